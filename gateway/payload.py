"""The JSON that goes to the engine: the client's fields, and those that only the gateway sets."""

from dataclasses import dataclass
from typing import Any

import orjson

from gateway.backends.facts import EngineFacts
from gateway.messages import splice
from gateway.turns import Turn
from gateway.wire import to_json


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as it is sent to whichever engine it meets.

    Engines that take salts keep tenants apart, also beside one that is known to refuse them.
    """

    fields: dict[str, Any]
    salt: str

    def to(self, facts: EngineFacts) -> bytes:
        return to_json(self.fields if facts.cache_salt is False else {**self.fields, "cache_salt": self.salt})


def turn_payload(turn: Turn, body: dict[str, Any]) -> EngineRequest:
    """The request of a turn: its rendered messages, and their token ids where the engine takes them."""
    messages = [{"role": message.role, "content": message.content} for message in turn.prompt.messages]
    if not turn.conversation.plain:
        messages = splice(turn.conversation, messages)
    payload = engine_body(body, turn.served_model, stream=bool(turn.request.stream))
    payload["messages"] = messages
    prompt = turn.prompt
    if prompt.token_ids is not None:
        ids = prompt.token_ids if prompt.ids_json is None else orjson.Fragment(prompt.ids_json)
        payload["kv_transfer_params"] = {"prompt_token_ids": ids}
    if turn.plan.max_tokens is not None:
        payload.pop("max_completion_tokens", None)
        payload["max_tokens"] = turn.plan.max_tokens
    return EngineRequest(payload, turn.context.cache_salt)


def engine_body(body: dict[str, Any], served_model: str, *, stream: bool) -> dict[str, Any]:
    """The client's body without our extension, with a request for usage."""
    payload = {key: value for key, value in body.items() if key != "headstart"}
    payload["model"] = served_model
    if stream:
        options = body.get("stream_options") or {}
        if not options.get("include_usage"):
            # Says how usage is to come; without the client's own wish for usage it would come to the client unasked.
            options = {name: value for name, value in options.items() if name != "continuous_usage_stats"}
        payload["stream_options"] = {**options, "include_usage": True}
    return payload
