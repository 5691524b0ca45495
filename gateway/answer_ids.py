"""The token ids of an answer, found out from its text when it is over: the engine is not asked to echo them.

Echoed ids would cost every stream its bytes. The served tokenizer gives those of the text; they are believed where
their number agrees with the engine's count, so a text that the model spelled in other tokens is found out.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cache.residency import Lease, Residency
from gateway.timings import EngineUsage
from prompt_builder.types import Tokenizer

SMALL_CHARACTERS = 8 * 1024
"""Up to this much text is tokenized in passing; a thread's hand-over costs more."""


@dataclass(frozen=True, slots=True)
class NamedAnswer:
    """`text` gives what was said, None where it is not text alone; `encode` is the served tokenizer's."""

    text: Callable[[], str | None]
    encode: Callable[[str], Sequence[int]]


def named_answer(tokenizer: Tokenizer, text: Callable[[], str | None]) -> NamedAnswer | None:
    """None where the served tokenizer is not known."""
    return NamedAnswer(text, tokenizer.encode) if tokenizer.exact else None


def name_soon(residency: Residency, lease: Lease, answer: NamedAnswer, usage: EngineUsage) -> None:
    """Names the blocks that the answer has left, once the loop has done what it is at."""
    if usage.output_tokens is None or not _has_blocks(lease, usage.output_tokens):
        return
    asyncio.get_running_loop().call_soon(_name, residency, lease, answer, usage)


def agreeing(ids: Sequence[int], usage: EngineUsage) -> bool:
    """Whether the engine counted as many tokens: one more where it ended its answer itself, with the end token."""
    ends = {"stop": 1, "length": 0}.get(usage.finish_reason or "")
    return ends is not None and usage.output_tokens == len(ids) + ends


def _name(residency: Residency, lease: Lease, answer: NamedAnswer, usage: EngineUsage) -> None:
    text = answer.text()
    if text is None:
        return

    def name(ids: Sequence[int]) -> None:
        if agreeing(ids, usage):
            residency.answered(lease, usage.output_tokens or 0, ids)

    if len(text) <= SMALL_CHARACTERS:
        name(answer.encode(text))
        return
    encoding = asyncio.get_running_loop().run_in_executor(None, answer.encode, text)
    encoding.add_done_callback(lambda done: name(done.result()) if done.exception() is None else None)


def _has_blocks(lease: Lease, output_tokens: int) -> bool:
    """The last token is never computed."""
    size = lease.block_size
    return (lease.prompt_tokens + output_tokens - 1) // size > lease.prompt_tokens // size
