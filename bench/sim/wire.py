"""The bytes of OpenAI-shaped answers: event payloads, whole bodies, usage, errors."""

from dataclasses import dataclass
from typing import Any

import orjson

from bench.sim.answers import Delta, Script, tool_call_id
from bench.sim.tokens import SimTokenizer


@dataclass(frozen=True, slots=True)
class Shape:
    """Chat or plain completion, and what the request asked to see."""

    chat: bool
    answer_id: str
    created: int
    model: str
    return_token_ids: bool = False
    logprobs: bool = False
    include_usage: bool = False

    def envelope(self, choices: list[dict[str, Any]], stream: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if stream else "chat.completion") if self.chat else "text_completion"
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def error_body(message: str, kind: str, code: int, param: str | None = None) -> bytes:
    """An error in the engine's shape."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def role_event(shape: Shape, index: int, prompt_ids: list[int]) -> bytes:
    """The first chat event of a choice."""
    choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    payload = shape.envelope([choice], stream=True)
    if shape.return_token_ids:
        payload["prompt_token_ids"] = prompt_ids
    return orjson.dumps(payload)


def delta_event(
    shape: Shape, index: int, delta: Delta, tokenizer: SimTokenizer, prompt_ids: list[int] | None, finish: bool = True
) -> bytes:
    """One piece of an answer. `finish` false leaves the finish_reason out."""
    choice: dict[str, Any] = {"index": index}
    if shape.chat:
        choice["delta"] = delta.delta
    else:
        choice["text"] = delta.delta.get("content", "")
    choice["logprobs"] = logprobs(shape, delta.ids, tokenizer) if shape.logprobs else None
    choice["finish_reason"] = delta.finish_reason if finish else None
    if delta.finish_reason is not None and finish:
        choice["stop_reason"] = delta.stop_reason
    if shape.return_token_ids:
        choice["token_ids"] = delta.ids
        if prompt_ids is not None and not shape.chat:
            choice["prompt_token_ids"] = prompt_ids
    return orjson.dumps(shape.envelope([choice], stream=True))


def usage_event(shape: Shape, usage: dict[str, Any]) -> bytes:
    """The last event of a stream that was asked for usage."""
    return orjson.dumps({**shape.envelope([], stream=True), "usage": usage})


def usage(prompt: int, completion: int, cached: int | None, created: int | None) -> dict[str, Any]:
    """`cached` None: an engine that was not started with the details."""
    details = None if cached is None else {"cached_tokens": cached, "created_cache_tokens": created}
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": details,
    }


def whole_answer(
    shape: Shape,
    scripts: list[Script],
    prompt_ids: list[int],
    usage: dict[str, Any],
    tokenizer: SimTokenizer,
    reasoning_field: str,
) -> bytes:
    """The body of an answer that is not streamed."""
    choices = []
    for index, script in enumerate(scripts):
        choice: dict[str, Any] = {"index": index}
        if shape.chat:
            message: dict[str, Any] = {"role": "assistant", "content": script.answer.text or None}
            if not script.answer.tool_calls:
                message["content"] = script.answer.text
            message["tool_calls"] = [
                {
                    "id": tool_call_id(i),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for i, call in enumerate(script.answer.tool_calls)
            ]
            message[reasoning_field] = script.answer.reasoning or None
            choice["message"] = message
        else:
            choice["text"] = script.answer.text
        choice["logprobs"] = logprobs(shape, script.output, tokenizer) if shape.logprobs else None
        choice["finish_reason"], choice["stop_reason"] = script.finish_reason, script.stop_reason
        if shape.return_token_ids:
            choice["token_ids"] = script.output
            if not shape.chat:
                choice["prompt_token_ids"] = prompt_ids
        choices.append(choice)
    body = {**shape.envelope(choices, stream=False), "usage": usage}
    if shape.return_token_ids and shape.chat:
        body["prompt_token_ids"] = prompt_ids
    return orjson.dumps(body)


def logprobs(shape: Shape, ids: tuple[int, ...], tokenizer: SimTokenizer) -> dict[str, Any]:
    """One invented, constant log-probability a token."""
    texts = [tokenizer.decode([token_id]) for token_id in ids]
    if shape.chat:
        entries = [{"token": t, "logprob": -0.5, "bytes": list(t.encode()), "top_logprobs": []} for t in texts]
        return {"content": entries}
    return {"tokens": texts, "token_logprobs": [-0.5] * len(texts), "top_logprobs": None, "text_offset": []}


class PlainFrames:
    """The chat events of one plain script, encoded ahead but for the answer's id and time of creation."""

    def __init__(self, script: Script, model: str) -> None:
        tail = b',"model":' + orjson.dumps(model) + b',"choices":['
        role = Delta(1, (), {"role": "assistant", "content": ""})
        self._tails: list[tuple[int, bytes]] = []
        for delta in (role, *script.deltas):
            choice: dict[str, Any] = {
                "index": 0,
                "delta": delta.delta,
                "logprobs": None,
                "finish_reason": delta.finish_reason,
            }
            if delta.finish_reason is not None:
                choice["stop_reason"] = delta.stop_reason
            self._tails.append((delta.tokens_ready, tail + orjson.dumps(choice) + b"]}\n\n\r\n"))

    def for_answer(self, answer_id: str, created: int) -> list[tuple[int, bytes]]:
        """(tokens that must be ready, chunk of the chunked body) of each event."""
        head = b'data: {"id":"%b","object":"chat.completion.chunk","created":%d' % (answer_id.encode(), created)
        size = len(head) - 2
        return [(ready, b"%x\r\n%b%b" % (size + len(tail), head, tail)) for ready, tail in self._tails]
