"""Requests of the gateway's own, sent while a replica is idle and dropped as soon as a user waits."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from gateway.answers import read_usage, whole_answer
from gateway.pacing import Background
from gateway.payload import EngineRequest, engine_body
from gateway.prefix import PrefixBreaks, plain_told
from gateway.replica import Replica
from gateway.timings import EngineUsage
from gateway.turns import Turn
from gateway.wire import TEMPLATE_FIELDS
from prompt_builder.types import Prompt

Result = TypeVar("Result")


class Abandoned(Exception):
    """A user's request came and the engine's request was aborted; or the engine is to have no new one."""


@dataclass(frozen=True, slots=True)
class IdleAnswer:
    """`whole` is False where the answer ended at its limit."""

    text: str
    whole: bool
    usage: EngineUsage


async def ask_idle(
    replica: Replica, breaks: PrefixBreaks, idle: Background, turn: Turn, prompt: Prompt, max_tokens: int
) -> IdleAnswer:
    """A greedy answer to a prompt of this turn's conversation, under its tenant's salt. Raises Abandoned, ApiError.

    What it leaves in the engine's cache goes into the replica's residency. An engine that was taken off the list
    while the work waited is asked nothing more.
    """
    if replica.draining:
        raise Abandoned
    residency, salt = replica.residency, turn.context.cache_salt
    payload = EngineRequest(_fields(turn, prompt, max_tokens), salt).to(replica.facts)
    lease = None
    if residency is not None and prompt.token_ids is not None:
        lease = residency.begin(prompt.token_ids, salt)
    try:
        body = whole_answer(await unless_abandoned(idle, replica.backend.complete(payload)))
        usage = read_usage(body)
        predicted = None if lease is None else lease.cached_tokens
        breaks.computed(replica, plain_told(prompt, salt), usage.cached_tokens, predicted)
        if residency is not None:
            if lease is not None:
                residency.reconcile(lease, usage.cached_tokens)
                residency.generated_unknown(lease, usage.output_tokens or 0)
            elif usage.prompt_tokens is not None:
                uncached = usage.prompt_tokens - (usage.cached_tokens or 0)
                residency.ran_unknown(uncached + (usage.output_tokens or 0))
    finally:
        if residency is not None and lease is not None:
            residency.end(lease)
    choice: dict[str, Any] = next(iter(body.get("choices") or ()), {})
    text = (choice.get("message") or {}).get("content") or ""
    return IdleAnswer(text, choice.get("finish_reason") != "length", usage)


async def unless_abandoned(idle: Background, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result. Raises Abandoned once a user waits; the work has been cancelled and has ended by then."""
    task = asyncio.create_task(work)
    signal = asyncio.create_task(idle.abandoned.wait())
    try:
        await asyncio.wait((task, signal), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Abandoned
    finally:
        task.cancel()
        signal.cancel()
        await asyncio.gather(task, signal, return_exceptions=True)


def _fields(turn: Turn, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
    stated = turn.request.model_extra or {}
    # Where the engine applies its template, it must do so as for the user's requests.
    shaping = {name: stated[name] for name in TEMPLATE_FIELDS if stated.get(name) is not None}
    fields = engine_body(shaping, turn.served_model, stream=False)
    fields["messages"] = [{"role": message.role, "content": message.content} for message in prompt.messages]
    fields |= {"max_tokens": max_tokens, "temperature": 0}
    if prompt.token_ids is not None:
        fields["kv_transfer_params"] = {"prompt_token_ids": prompt.token_ids}
    return fields
