"""The arms of `bench.turns`: how the same turn becomes a prompt, and what is known of the engine that gets it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cache.memory import MemoryStore
from cache.residency import Residency
from gateway.serving import Serving
from latency.speed import SpeedEstimate
from prompt_builder.labels import QUESTION_MARK
from prompt_builder.layout import system_text
from prompt_builder.outlook import Clock, Outlook
from prompt_builder.transcripts import Transcripts
from prompt_builder.types import Limits, Message, Prompt, Transcript
from retrieval.types import Candidates

TENANT = "bench"
NO_BUDGET = Clock(None, 0.0)


@dataclass(frozen=True, slots=True)
class AskedTurn:
    """A turn of a conversation; `answer` is the reference that will follow it in the history."""

    past: tuple[Message, ...]
    question: str
    candidates: Candidates
    answer: str
    salt: str


@dataclass(frozen=True, slots=True)
class Built:
    """A prompt ready to send. `left_out` counts the past turns and chunks that its window had no room for."""

    prompt: Prompt
    as_messages: bool
    left_out: int = 0


class Sight:
    """An engine as the planner sees it: its speed, and what it holds."""

    def __init__(self, speed: SpeedEstimate, residency: Residency) -> None:
        self.speed = speed
        self._residency = residency

    def outlook(self, salt: str) -> Outlook:
        return Outlook("engine", self.speed, _no_wait, self._residency.prefix(salt))

    def cached_tokens(self, prompt: Prompt, salt: str) -> int:
        """What the engine is predicted to reuse of a prompt that has token ids."""
        return self._residency.prefix(salt).extended(prompt.token_ids or ()).cached_tokens()

    def computed(self, prompt: Prompt, salt: str, cached_tokens: int | None = None) -> None:
        """The engine has computed a prompt; `cached_tokens` where it told them."""
        lease = self._residency.begin(prompt.token_ids or (), salt)
        self._residency.reconcile(lease, cached_tokens)
        self._residency.end(lease)


class Arm(Protocol):
    @property
    def name(self) -> str: ...

    async def build(self, turn: AskedTurn) -> Built: ...


class SystemChunks:
    """(i): the chunks, most relevant first, behind the instructions in the system message."""

    name = "(i) chunks in the system message"

    def __init__(self, serving: Serving, instructions: str) -> None:
        self._serving = serving
        self._instructions = instructions

    async def build(self, turn: AskedTurn) -> Built:
        system = system_text(self._instructions, _blocks(turn.candidates).rstrip())
        return _plain(self._serving, [Message("system", system), *turn.past, Message("user", turn.question)])


class UserChunks:
    """(ii): the chunks, most relevant first, before the question; the history holds none."""

    name = "(ii) chunks in the last user message"

    def __init__(self, serving: Serving, instructions: str) -> None:
        self._serving = serving
        self._instructions = instructions

    async def build(self, turn: AskedTurn) -> Built:
        asked = f"{_blocks(turn.candidates)}{QUESTION_MARK} {turn.question}"
        return _plain(self._serving, [Message("system", self._instructions), *turn.past, Message("user", asked)])


class Ours:
    """(iii), (iv) and (v): the product's prompt, its transcripts found again in the history that is sent again."""

    def __init__(self, name: str, serving: Serving, limits: Limits, sight: Sight) -> None:
        self.name = name
        self._serving = serving
        self._limits = limits
        self._sight = sight
        self._transcripts = Transcripts(MemoryStore(2**28), ttl_s=86_400.0)

    async def build(self, turn: AskedTurn) -> Built:
        model = str(self._serving.facts.model)
        stated = [*turn.past, Message("user", turn.question)]
        transcript: Transcript = await self._transcripts.resume(TENANT, None, model, stated)
        plan = self._serving.planner.plan(
            transcript, turn.candidates, self._limits, (self._sight.outlook(turn.salt),), NO_BUDGET
        )
        prompt = self._serving.builder.render(plan)
        await self._transcripts.record(TENANT, None, model, transcript, plan, turn.answer)
        left_out = sum(item.what in ("turn", "chunk") for item in plan.dropped)
        return Built(prompt, as_messages=False, left_out=left_out)


def _blocks(candidates: Candidates) -> str:
    """The chunks' blocks as ours renders them, most relevant first."""
    return "".join(item.chunk.rendered.text for item in candidates.items)


def _plain(serving: Serving, messages: Sequence[Message]) -> Built:
    return Built(serving.builder.passthrough(messages), as_messages=True)


def _no_wait(prefill_s: float) -> float:
    return 0.0
