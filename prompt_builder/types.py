"""The values that flow through prompt building: Transcript and Candidates in, Plan, then Prompt, out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from latency.speed import Forecast
from retrieval.types import Candidate, RenderedChunk

Role = Literal["system", "developer", "user", "assistant", "tool"]
Rendering = Literal["kept", "stripped"]
RenderingChoice = Literal["auto", "kept", "stripped"]
ChunkForm = Literal["whole", "extract"]
ChunkOrder = Literal["reuse", "relevance_last", "relevance_first", "label"]
SegmentKind = Literal["scaffold", "system", "summary", "turn", "chunk", "reference", "evidence", "facts", "question"]


class Tokenizer(Protocol):
    """The served model's tokenizer. `exact` is False for the estimate used when none is known."""

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def exact(self) -> bool: ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of `text` as ordinary text: control tokens in it are never special."""

    def encode_scaffold(self, text: str) -> tuple[int, ...]:
        """Ids of template text, in which control tokens are special."""

    def count(self, text: str) -> int: ...


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """A chunk that stands, or stood, in a prompt, with what a citation needs.

    `body` is the whole chunk's text. The `extract` form renders some of its sentences under the same label.
    """

    label: str
    file_id: str
    filename: str
    title: str
    relevance: float
    body: str
    rendered: RenderedChunk
    form: ChunkForm = "whole"


@dataclass(frozen=True, slots=True)
class TurnContext:
    """What the gateway put before a user's question when the turn was first sent."""

    chunks: tuple[PromptChunk, ...]
    references: tuple[str, ...]
    evidence: str
    facts: str


@dataclass(frozen=True, slots=True)
class PastMessage:
    """One message of the history; `context` only for user messages that this gateway sent with chunks."""

    role: Role
    content: str
    context: TurnContext | None = None


@dataclass(frozen=True, slots=True)
class Transcript:
    """A conversation up to and including the new question.

    `system` joins the client's leading system and developer messages. `known` is the number of past
    messages whose rendering the gateway recognised. `summary` stands for the first `folded` of the past messages,
    which are then not rendered; it may hold text of the files `summary_files`. `stripped` is the number of leading
    past messages that the conversation's last prompt rendered without chunks: these are what the engine holds.
    """

    system: str
    past: tuple[PastMessage, ...]
    question: str
    facts: str = ""
    known: int = 0
    summary: str = ""
    folded: int = 0
    stripped: int = 0
    summary_files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """What the plan must fit, and what the request wants otherwise than the settings (None: as they say).

    `window_tokens` None: the engine did not say, nothing is trimmed for it. `pin_last` chunks, the most relevant, are
    held back for the last places. `instructed`: the prompt begins with the gateway's instructions, which speak of
    passages; a conversation without any goes without.
    """

    window_tokens: int | None
    max_tokens: int | None
    min_answer_tokens: int
    top_k: int
    chunk_order: ChunkOrder | None = None
    pin_last: int | None = None
    evidence_lines: int | None = None
    instructed: bool = True


@dataclass(frozen=True, slots=True)
class Dropped:
    """`what`: chunk, turn, evidence or max_tokens; `name`: label or position; `reason` is a sentence."""

    what: Literal["chunk", "turn", "evidence", "max_tokens"]
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes into the prompt, in order, and what does not, and why.

    `past` holds the messages that are rendered, those behind the fold; messages without a context render as the
    client states them. `stripped` of them, the leading ones, are rendered without the context that they had; the
    `folded` messages before them are in the `summary`. `forecast` is None where no replica's speed is known.
    """

    system: str
    past: tuple[PastMessage, ...]
    rendering: Rendering
    chunks: tuple[PromptChunk, ...]
    references: tuple[PromptChunk, ...]
    evidence: str
    facts: str
    question: str
    max_tokens: int | None
    dropped: tuple[Dropped, ...]
    summary: str = ""
    folded: int = 0
    stripped: int = 0
    instructed: bool = True
    forecast: Forecast | None = None


@dataclass(frozen=True, slots=True)
class Alternative:
    """What a request would get for another budget: the smallest TTFT budget, in seconds, that allows this.

    `chunks` of the candidates stand in the prompt, `extracts` of them as extracts. `relevance_kept` is their share, 0
    to 1, of the relevance that a request without a budget would get.
    """

    budget_s: float
    chunks: int
    extracts: int
    prompt_tokens: int
    uncached_tokens: int
    relevance_kept: float


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the prompt that is tokenized by itself."""

    kind: SegmentKind
    text: str
    token_ids: tuple[int, ...]
    label: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt that is sent.

    `token_ids` is the concatenation of the segments' ids, or None where the engine must template the
    `messages` itself (`inexact_reason` says why). `tokens` counts the prompt either way. `ids_json` are the ids as
    JSON, where most of it was at hand from an earlier prompt.
    """

    segments: tuple[Segment, ...]
    messages: tuple[Message, ...]
    token_ids: tuple[int, ...] | None
    tokens: int
    block_hashes: Sequence[bytes]
    inexact_reason: str | None = None
    ids_json: bytes | None = field(default=None, compare=False, repr=False)


class QuestionTooLong(Exception):
    """The question alone does not fit the window beside the smallest answer."""

    def __init__(self, question_tokens: int, fixed_tokens: int, window_tokens: int, answer_tokens: int) -> None:
        super().__init__(
            f"The last user message has {question_tokens} tokens; with {fixed_tokens} tokens of system text and "
            f"template and at least {answer_tokens} for the answer it exceeds the model's window of "
            f"{window_tokens} tokens. Shorten the message."
        )
        self.question_tokens = question_tokens
        self.fixed_tokens = fixed_tokens
        self.window_tokens = window_tokens
        self.answer_tokens = answer_tokens


__all__ = [
    "Alternative",
    "Candidate",
    "ChunkForm",
    "ChunkOrder",
    "Dropped",
    "Limits",
    "Message",
    "PastMessage",
    "Plan",
    "Prompt",
    "PromptChunk",
    "QuestionTooLong",
    "Rendering",
    "RenderingChoice",
    "Role",
    "Segment",
    "SegmentKind",
    "Tokenizer",
    "Transcript",
    "TurnContext",
]
