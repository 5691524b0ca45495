"""The JSON that goes to the engine: the client's fields, and those that only the gateway sets."""

from typing import Any

from gateway.context import RequestContext
from gateway.messages import splice
from gateway.serving import Serving
from gateway.turns import Turn
from gateway.wire import to_json


def turn_payload(turn: Turn, body: dict[str, Any]) -> bytes:
    """The request of a turn: its rendered messages, and their token ids where the engine takes them."""
    messages = [{"role": message.role, "content": message.content} for message in turn.prompt.messages]
    if not turn.conversation.plain:
        messages = splice(turn.conversation, messages)
    payload = engine_body(body, turn.context, turn.served_model, turn.serving, stream=bool(turn.request.stream))
    payload["messages"] = messages
    if turn.prompt.token_ids is not None:
        payload["kv_transfer_params"] = {"prompt_token_ids": turn.prompt.token_ids}
    if turn.plan.max_tokens is not None:
        payload.pop("max_completion_tokens", None)
        payload["max_tokens"] = turn.plan.max_tokens
    return to_json(payload)


def engine_body(
    body: dict[str, Any], context: RequestContext, served_model: str, serving: Serving, *, stream: bool
) -> dict[str, Any]:
    """The client's body without our extension, with the tenant's salt and a request for usage."""
    payload = {key: value for key, value in body.items() if key != "headstart"}
    payload["model"] = served_model
    if serving.facts.cache_salt is not False:
        payload["cache_salt"] = context.cache_salt
    if stream:
        options = body.get("stream_options") or {}
        if not options.get("include_usage"):
            # Says how usage is to come; without the client's own wish for usage it would come to the client unasked.
            options = {name: value for name, value in options.items() if name != "continuous_usage_stats"}
        payload["stream_options"] = {**options, "include_usage": True}
    return payload
