"""A chat of one user before a real replica and a simulated engine, without the gateway's HTTP between."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson

from bench.engine_sim import AnswerContext, EngineSim, SimConfig
from cache.memory import MemoryStore
from gateway.answers import read_usage
from gateway.backends.vllm import EngineLimits, EngineSession
from gateway.budgets import Budget
from gateway.context import RequestContext
from gateway.folding import Folder, FoldSettings
from gateway.messages import read_conversation
from gateway.metrics import Metrics
from gateway.payload import turn_payload
from gateway.planning import plan_prompt
from gateway.prefix import PrefixBreaks
from gateway.replica import Replica
from gateway.replicas import Replicas
from gateway.settings import Settings
from gateway.turns import Turn
from gateway.wire import ChatRequest
from prompt_builder.outlook import Clock
from prompt_builder.transcripts import Transcripts
from prompt_builder.types import Limits, Transcript
from retrieval.types import Candidates

INSTRUCTION_START = "Summarise the conversation so far"
LIMITS = EngineLimits(5.0, 60.0, 60.0, 60.0)
SYSTEM = "You are the harbour's clerk. Be exact."
SUMMARY = "The user is Ada. She asks about boats in Porto."
FILLER = "The tide comes in and goes out again as it has always done. " * 6


def answer(context: AnswerContext) -> str:
    """What the simulated engine says: a summary where one is asked for, else about 90 tokens of little interest."""
    return SUMMARY if INSTRUCTION_START in context.question() else FILLER


async def until(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Raises TimeoutError."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError
        await asyncio.sleep(0.001)


@asynccontextmanager
async def replicas_of(sim: EngineSim, folder: Path, model_dir: Path) -> AsyncIterator[Replicas]:
    settings = Settings(
        data_dir=folder / "data",
        cache_dir=folder / "cache",
        engine_url=sim.url,
        tokenizer=str(model_dir),
        calibrate=False,
    )
    async with EngineSession(LIMITS) as session, Replicas(settings, session, LIMITS) as replicas:
        yield replicas


class Chats:
    """Several chats on one replica, one memory and one folder."""

    def __init__(self, sim: EngineSim, replicas: Replicas, folder: Folder, transcripts: Transcripts) -> None:
        self.sim = sim
        self.replicas = replicas
        self.folder = folder
        self.transcripts = transcripts

    @property
    def replica(self) -> Replica:
        return self.replicas.all[0]

    def chat(self, user: str = "ada", system: str = SYSTEM) -> "Chat":
        return Chat(self, user, system)

    async def settled(self, timeout_s: float = 10.0) -> None:
        """Waits until the folder has nothing to do. Raises TimeoutError."""
        await until(lambda: not self.folder.waiting, timeout_s)


class Chat:
    def __init__(self, chats: Chats, user: str, system: str) -> None:
        self._chats = chats
        self.user = user
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []

    async def say(self, text: str, *, settle: bool = True) -> Turn:
        """Asks, takes the answer into the history, and waits for what happens in the background."""
        turn, said = await self.ask(text)
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": said}]
        if settle:
            await self._chats.settled()
        return turn

    async def ask(self, text: str, **fields: Any) -> tuple[Turn, str]:
        """The answer to a question behind the history, which does not go into it."""
        chats = self._chats
        turn = await self.prepare(text, **fields)
        payload = turn_payload(turn, {"model": "sim-model"})
        replica, run = await chats.replicas.enter(turn.work, turn.context.cache_salt)
        try:
            body = orjson.loads(await replica.backend.complete(payload.to(replica.facts)))
            run.answered(read_usage(body))
        finally:
            run.close()
        said: str = body["choices"][0]["message"]["content"]
        await chats.transcripts.record("t", self.user, "sim-model", turn.transcript, turn.plan, said)
        chats.folder.after(turn, replica, {0: said})
        return turn, said

    async def prepare(self, text: str, **fields: Any) -> Turn:
        chats = self._chats
        request = ChatRequest(
            model="sim-model",
            messages=[*self.messages, {"role": "user", "content": text}],
            user=self.user,
            **fields,
        )
        context = RequestContext("r", "t", "5a17", time.monotonic())
        serving = chats.replicas.serving
        conversation = read_conversation(request)
        assert conversation is not None
        conversation = conversation.with_transcript(
            await chats.transcripts.resume("t", self.user, "sim-model", conversation.messages)
        )
        limits = Limits(serving.facts.max_model_len, request.answer_limit or 128, 64, 5)
        clock = Clock(None, 0.0)
        outlooks = chats.replicas.outlooks(context.cache_salt)
        plan, prompt = plan_prompt(serving, conversation, Candidates(()), limits, context.cache_salt, outlooks, clock)
        return Turn(
            request=request,
            context=context,
            serving=serving,
            served_model="sim-model",
            stores=(),
            conversation=conversation,
            candidates=Candidates(()),
            limits=limits,
            clock=clock,
            plan=plan,
            prompt=prompt,
            budget=Budget(),
            retrieve_ms=0.0,
            plan_ms=0.0,
        )

    async def transcript(self) -> Transcript:
        """What is known of the conversation now."""
        return (await self.prepare("And now?")).transcript


@asynccontextmanager
async def chats_of(
    folder: Path,
    model_dir: Path,
    *,
    fold: FoldSettings,
    **changes: Any,
) -> AsyncIterator[Chats]:
    """Chats before a simulated engine; `changes` are its configuration's."""
    given: dict[str, Any] = {
        "model_dir": model_dir,
        "time_scale": 0.01,
        "decode_tokens_per_s": None,
        "answer": answer,
        **changes,
    }
    async with EngineSim(SimConfig(**given)) as sim, replicas_of(sim, folder, model_dir) as replicas:
        transcripts = Transcripts(MemoryStore(2**24), 1000.0)
        async with Folder(transcripts, PrefixBreaks(Metrics()), fold) as folder_:
            yield Chats(sim, replicas, folder_, transcripts)
