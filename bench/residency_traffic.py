"""Chats of a few tenants over shared passages: what a small cache must give up and find again all the time."""

import asyncio
import hashlib
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from bench.reply import read_reply

TENANTS = ("ada", "bob")
WORDS = (
    "harbour tide crane barge cargo captain customs ledger storm anchor rope pilot lantern quay winter "
    "salt timber grain river bridge market signal engine valley garden copper window letter teacher "
    "bottle journey mountain"
)
PASSAGES = 14
PASSAGE_WORDS = (25, 110)
MOST_WORDS = 560
"""Of a conversation; longer ones are not gone on with: four of them must fit into the cache at once."""
KEPT = 10
PROGRESS_S = 15.0

Sessions = Mapping[str, aiohttp.ClientSession]
"""A tenant's connections to the gateway."""


def keys() -> str:
    """The tenants' API keys as the gateway's setting takes them; a tenant's key is its name."""
    return ",".join(f"{name}:{hashlib.sha256(name.encode()).hexdigest()}" for name in TENANTS)


@dataclass(slots=True)
class Chat:
    tenant: str
    messages: list[dict[str, str]]

    @property
    def words(self) -> int:
        return sum(len(message["content"].split()) for message in self.messages)


class Traffic:
    """One client, seeded. `ask` sends one request: a new chat, or one that goes on from an answer."""

    def __init__(self, model: str, seed: int) -> None:
        self.model = model
        self.past: list[Chat] = []
        self._random = random.Random(seed)
        self._words = WORDS.split()
        self._passages = [self._text(self._random.randint(*PASSAGE_WORDS)) for _ in range(PASSAGES)]
        self._systems = [f"You are a clerk. {self._text(30)}", f"You are a pilot. {self._text(45)}"]

    def next_chat(self) -> Chat:
        draw = self._random
        if self.past and draw.random() < 0.5:
            chat = self.past.pop(draw.randrange(len(self.past)))
            question = {"role": "user", "content": f"And {self._text(draw.randint(4, 25))}?"}
            if chat.words < MOST_WORDS:
                return Chat(chat.tenant, [*chat.messages, question])
        passages = draw.sample(self._passages, draw.randint(1, 3))
        text = "\n\n".join([*passages, f"What of {self._text(draw.randint(3, 15))}?"])
        messages = [{"role": "user", "content": text}]
        if draw.random() < 0.6:
            messages.insert(0, {"role": "system", "content": draw.choice(self._systems)})
        return Chat(draw.choice(TENANTS), messages)

    async def ask(self, sessions: Sessions) -> bool:
        """False where no answer came."""
        chat = self.next_chat()
        draw = self._random
        body: dict[str, Any] = {
            "model": self.model,
            "messages": chat.messages,
            "max_tokens": draw.randint(4, 28),
            "temperature": 0,
            "stream": draw.random() < 0.8,
        }
        try:
            reply = await read_reply(sessions[chat.tenant], body)
        except (aiohttp.ClientError, TimeoutError):
            return False
        if reply.status != 200 or not reply.complete:
            return False
        if reply.text.strip():
            self.past.append(Chat(chat.tenant, [*chat.messages, {"role": "assistant", "content": reply.text}]))
            del self.past[:-KEPT]
        return True

    def _text(self, words: int) -> str:
        return " ".join(self._random.choice(self._words) for _ in range(words))


@dataclass(frozen=True, slots=True)
class Prediction:
    """Cached tokens of one answer; `created` is Unix time."""

    created: float
    predicted: int
    reported: int

    @property
    def exact(self) -> bool:
        return self.predicted == self.reported


async def predictions(sessions: Sessions) -> list[Prediction]:
    """Of the gateway's recent answers, oldest first."""
    found = []
    for session in sessions.values():
        async with session.get("/v1/calls?limit=1000") as response:
            response.raise_for_status()
            calls = (await response.json())["data"]
        for call in calls:
            timings = call["timings"] or {}
            predicted, reported = timings.get("predicted_cached_tokens"), timings.get("cached_tokens")
            if call["status"] == 200 and predicted is not None and reported is not None:
                found.append(Prediction(call["created"], predicted, reported))
    return sorted(found, key=lambda prediction: prediction.created)


async def run_clients(sessions: Sessions, traffics: Sequence[Traffic], requests: int) -> int:
    """Each client asks one request after the other, `requests` in all; how many were not answered."""
    left = requests
    failed = 0
    began = said = time.monotonic()

    async def client(traffic: Traffic) -> None:
        nonlocal left, failed, said
        while left > 0:
            left -= 1
            failed += not await traffic.ask(sessions)
            if time.monotonic() - said >= PROGRESS_S:
                said = time.monotonic()
                print(f"  {requests - left} of {requests} requests sent, {said - began:.0f} s", flush=True)

    async with asyncio.TaskGroup() as group:
        for traffic in traffics:
            group.create_task(client(traffic))
    return failed
