"""The two arms of `bench.history`: a client that keeps a sliding window, and one that talks to the gateway."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from bench.answer import Answer, AnswerReader
from bench.gateway_thread import RunningGateway
from bench.reply import CHAT_PATH
from prompt_builder.history import Marks
from prompt_builder.layout import UNKNOWN_SCAFFOLD_TOKENS
from prompt_builder.types import Tokenizer

SYSTEM = "You are a patient companion who talks about boats. Answer briefly."
NAME = "bench-history"
THINK_S = 15.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Sizes:
    turns: int
    high_tokens: int
    answer_tokens: int

    @property
    def marks(self) -> Marks:
        return Marks(self.high_tokens, self.high_tokens // 2)


@dataclass(frozen=True, slots=True)
class Held:
    """A chat that is over. `summary` is what stands for its folded turns; `folded` of its messages."""

    answers: tuple[Answer, ...]
    summary: str = ""
    folded: int = 0
    folds: int = 0


class Window:
    """The last turns within the high mark, cut by one turn at a time."""

    def __init__(
        self, session: aiohttp.ClientSession, model: str, tokenizer: Tokenizer, sizes: Sizes, salt: str
    ) -> None:
        self._session = session
        self._model = model
        self._tokenizer = tokenizer
        self._sizes = sizes
        self._salt = salt
        self._turns: list[tuple[str, str]] = []

    async def say(self, text: str) -> Answer:
        while sum(map(self._tokens, self._turns)) > self._sizes.high_tokens:
            self._turns.pop(0)
        messages = [_message("system", SYSTEM)]
        for question, said in self._turns:
            messages += [_message("user", question), _message("assistant", said)]
        body = _body(self._model, [*messages, _message("user", text)], self._sizes) | {"cache_salt": self._salt}
        answer = await _ask(self._session, body)
        self._turns.append((text, answer.text))
        return answer

    def _tokens(self, turn: tuple[str, str]) -> int:
        return sum(self._tokenizer.count(text) + UNKNOWN_SCAFFOLD_TOKENS // 2 for text in turn)


class Ours:
    """A named conversation: the client sends its new message alone."""

    def __init__(self, gateway: RunningGateway, session: aiohttp.ClientSession, model: str, sizes: Sizes) -> None:
        self._gateway = gateway
        self._session = session
        self._model = model
        self._sizes = sizes
        self._said = False

    def _request(self, text: str) -> dict[str, Any]:
        messages = [_message("user", text)] if self._said else [_message("system", SYSTEM), _message("user", text)]
        return _body(self._model, messages, self._sizes) | {"headstart": {"conversation": NAME}}

    async def say(self, text: str) -> Answer:
        answer = await _ask(self._session, self._request(text))
        self._said = True
        return answer

    async def think(self) -> None:
        deadline_s = time.monotonic() + THINK_S
        while await self._gateway.metric("headstart_folds_waiting"):
            if time.monotonic() > deadline_s:
                return
            await asyncio.sleep(POLL_S)

    async def held(self, answers: Sequence[Answer]) -> Held:
        """Asks the gateway what it would send now: the summary stands in there."""
        async with self._session.post("/v1/plan", data=orjson.dumps(self._request("Go on."))) as response:
            plan = await response.json()
        summary = "".join(segment["text"] for segment in plan["segments"] if segment["kind"] == "summary")
        folds = int(await self._gateway.metric("headstart_folds"))
        return Held(tuple(answers), summary, plan["plan"]["folded_messages"], folds)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _body(model: str, messages: list[dict[str, str]], sizes: Sizes) -> dict[str, Any]:
    return {
        "model": model,
        "messages": messages,
        "max_tokens": sizes.answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _ask(session: aiohttp.ClientSession, body: Mapping[str, Any]) -> Answer:
    """The answer, and the time to the first bytes of its stream. Raises RuntimeError for a refusal."""
    reader = AnswerReader()
    began = time.perf_counter()
    headers = {"content-type": "application/json"}
    async with session.post(CHAT_PATH, data=orjson.dumps(body), headers=headers) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {(await response.text())[:300]}")
        data = await response.content.readany()
        ttft_s = time.perf_counter() - began
        while more := await response.content.readany():
            data += more
    reader.feed(data)
    return reader.answer(ttft_s)
