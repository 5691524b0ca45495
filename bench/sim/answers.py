"""What the simulated model says, and the script of deltas in which a stream says it."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.sim.config import Answer, AnswerContext, SimConfig
from bench.sim.tokens import Piece, SimTokenizer, text_of


@dataclass(frozen=True, slots=True)
class Delta:
    """One event: `tokens_ready` of the answer must be generated before it can leave."""

    tokens_ready: int
    ids: tuple[int, ...]
    delta: dict[str, Any]
    finish_reason: str | None = None
    stop_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Script:
    """A whole answer of one choice. `plain` has content alone, so its events can be encoded ahead."""

    answer: Answer
    deltas: tuple[Delta, ...]
    output: tuple[int, ...]
    finish_reason: str
    stop_reason: str | None
    plain: bool


class Scripter:
    """Chooses answers and cuts them to a request's limits; scripts of equal answers are shared."""

    def __init__(self, config: SimConfig, tokenizer: SimTokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._answered = 0
        self._scripts: dict[tuple[Any, ...], Script] = {}
        self._words = " ".join(f"word{i}" for i in range(config.answer_words))

    def answer(self, body: dict[str, Any], prompt_ids: list[int]) -> Answer:
        """The answer to one request, by the configured source."""
        source = self._config.answer
        if isinstance(source, list):
            source = source[min(self._answered, len(source) - 1)]
            self._answered += 1
        elif callable(source):
            source = source(
                AnswerContext(
                    body,
                    lambda: self._tokenizer.decode(prompt_ids),
                    lambda: self._question(body, prompt_ids),
                )
            )
        if isinstance(source, Answer):
            return source
        if source == "words":
            return Answer(self._words)
        if source in ("cite", "echo"):
            question = self._question(body, prompt_ids)
            lines = [line.strip() for line in question.split("\n") if line.strip()] or ["nothing"]
            label = re.search(self._config.label_pattern, question) if source == "cite" else None
            return Answer(f"According to {label.group()}: {lines[-1]}" if label else f"You asked: {lines[-1]}")
        return Answer(source.removeprefix("text:"))

    def script(self, answer: Answer, body: dict[str, Any], room_tokens: int) -> Script:
        """The deltas of an answer within `room_tokens`, `stop` and `ignore_eos` of the request."""
        stops = body.get("stop") or ()
        stops = (stops,) if isinstance(stops, str) else tuple(stops)
        ignore_eos = bool(body.get("ignore_eos"))
        key = (answer, room_tokens, stops, ignore_eos)
        script = self._scripts.get(key)
        if script is None:
            if len(self._scripts) >= 1000:
                self._scripts.clear()
            script = self._scripts[key] = self._build(answer, room_tokens, stops, ignore_eos)
        return script

    def _question(self, body: dict[str, Any], prompt_ids: list[int]) -> str:
        """The last user message; from the prompt itself where the request carries token ids."""
        messages = body.get("messages")
        if messages and not body.get("kv_transfer_params"):
            return next((text_of(m.get("content")) for m in reversed(messages) if m.get("role") == "user"), "")
        text = self._tokenizer.decode(prompt_ids)
        _, marker, tail = text.rpartition("<|im_start|>user")
        return (tail if marker else text).split("<|im_end|>", 1)[0]

    def _build(self, answer: Answer, room: int, stops: tuple[str, ...], ignore_eos: bool) -> Script:
        text, finish, stop_reason = answer.text, "stop", None
        cut = min(((text.find(s), s) for s in stops if s and s in text), default=None)
        if cut is not None:
            text, stop_reason = text[: cut[0]], cut[1]
        deltas: list[Delta] = []
        output: list[int] = []

        def say(piece: Piece, delta: Callable[[str], dict[str, Any]]) -> bool:
            shown, ids = piece
            left = room - len(output)
            output.extend(ids[:left])
            if len(ids) > left:
                shown = self._tokenizer.decode(ids[:left]).rstrip("\ufffd")
            if shown:
                deltas.append(Delta(len(output), ids[:left], delta(shown)))
            return len(ids) <= left

        def content(shown: str) -> dict[str, Any]:
            return {"content": shown}

        fits = all(say(p, lambda s: {self._config.reasoning_field: s}) for p in self._pieces(answer.reasoning))
        fits = fits and all(say(p, content) for p in self._pieces(text))
        while fits and ignore_eos and text and cut is None and len(output) < room:
            fits = all(say(p, content) for p in self._pieces(" " + text))
        for index, call in enumerate(answer.tool_calls):
            name = (call.name, tuple(self._tokenizer.encode(call.name)))
            fits = fits and say(name, partial(_tool_opening, index))
            fits = fits and all(say(p, partial(_tool_arguments, index)) for p in self._pieces(call.arguments))
        if fits and cut is None and len(output) < room:
            output.append(self._tokenizer.eos_id)
            finish = "tool_calls" if answer.tool_calls else "stop"
            ids: tuple[int, ...] = (self._tokenizer.eos_id,)
            deltas.append(Delta(len(output), ids, {"content": ""}, finish))
        else:
            finish = finish if fits and cut is not None else "length"
            deltas.append(Delta(max(1, len(output)), (), {"content": ""}, finish, stop_reason))
        if not output:
            output.append(self._tokenizer.eos_id)
        said = Answer(
            "".join(d.delta.get("content", "") for d in deltas),
            "".join(d.delta.get(self._config.reasoning_field, "") for d in deltas),
            answer.tool_calls if fits else (),
        )
        plain = not answer.reasoning and not answer.tool_calls
        return Script(said, tuple(deltas), tuple(output), finish, stop_reason, plain)

    def _pieces(self, text: str) -> tuple[Piece, ...]:
        return self._tokenizer.pieces(text, self._config.chunk_chars) if text else ()


def tool_call_id(index: int) -> str:
    """The id under which the simulated model's call number `index` travels."""
    return f"call_{index:08x}"


def _tool_opening(index: int, name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": ""}
    return {"tool_calls": [{"id": tool_call_id(index), "type": "function", "index": index, "function": function}]}


def _tool_arguments(index: int, arguments: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}
