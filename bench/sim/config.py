"""What a simulated engine is like, and the faults it can be asked for."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from latency.model import CPU_135M, PrefillModel

FaultKind = Literal[
    "cut",  # the connection closes after `after_chunks` events, without [DONE]
    "hang",  # nothing more is written after `after_chunks` events; ends when the client leaves
    "status",  # an error status instead of an answer
    "error_event",  # an error event inside the stream after `after_chunks` events
    "split",  # every write leaves in pieces of `write_bytes`: cuts characters and events anywhere
    "split_usage",  # the usage event leaves in two writes, cut in its middle
    "big_event",  # one content event of `big_bytes` after `after_chunks` events
    "drip",  # `delay_s` before every event
    "comments",  # an SSE comment before every event
    "crlf",  # events end with CR LF
    "no_finish",  # no finish_reason; [DONE] all the same unless `done` is false
]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `after_chunks` counts events with the role event as the first; None acts before the head.

    `count` is how many requests it strikes (None: all), `path` the start of the paths it strikes. Without `probes` it
    spares what a gateway asks by itself, at moments that no test knows: GETs, and answers of one token.
    `reset` closes with RST instead of FIN. `done` says whether an ended stream still says [DONE].
    """

    kind: FaultKind
    after_chunks: int | None = 0
    count: int | None = 1
    path: str = "/v1/"
    probes: bool = False
    status: int = 500
    body: str | None = None
    content_type: str = "application/json"
    retry_after: str | None = None
    write_bytes: int = 1
    delay_s: float = 0.05
    big_bytes: int = 2**20
    reset: bool = False
    done: bool = True
    message: str = "EngineCore encountered an issue. See stack trace (above) for the root cause."


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call the simulated model makes; `arguments` is JSON text."""

    name: str
    arguments: str = "{}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What the simulated model says to one prompt."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """What an answer may depend on: the request's body, and the prompt as the engine sees it."""

    body: dict[str, Any]
    prompt_text: Callable[[], str]
    question: Callable[[], str]


AnswerSource = str | Answer | list[str | Answer] | Callable[[AnswerContext], str | Answer]


@dataclass(frozen=True, slots=True)
class SimConfig:
    """Seconds are multiplied by `time_scale`. `fixed_ttft_s` replaces queue and prefill model altogether.

    `answer` is a mode (`cite`: names the first label of the last user message and repeats its last line;
    `echo`: the last line alone; `words`: `answer_words` words), `text:...` for a fixed text, an `Answer`, a
    list that is used in turn (its last entry from then on), or a callable.
    """

    model: str = "sim-model"
    model_dir: Path | None = None  # a folder with tokenizer.json and a chat template; None: one id per byte
    bytes_per_token: int = 1  # of the tokenizer used without `model_dir`: 1, 2 or 3
    max_model_len: int = 8192
    surface: Literal["vllm", "minimal"] = "vllm"
    reject_unknown_fields: bool = False  # minimal surface: 400 for engine controls instead of ignoring them
    api_key: str = ""

    # prefix cache
    block_size: int = 16
    num_gpu_blocks: int = 65_536
    prompt_tokens_details: bool = True

    # time
    prefill: PrefillModel = CPU_135M
    fixed_ttft_s: float | None = None
    inter_chunk_s: float = 0.0  # between the chunks of a stream, with `fixed_ttft_s` only
    time_scale: float = 1.0
    decode_tokens_per_s: float | None = 30.0  # None: the whole answer comes with its first token
    decode_shared: bool = False  # True: the rate is divided among the running requests
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    context_overflow: Literal["reject", "clamp"] = "reject"  # prompt + max_tokens beyond the window

    # answers
    answer: AnswerSource = "cite"
    answer_words: int = 32
    chunk_chars: int | None = None  # None: one event per word (bytes) or token (real tokenizer)
    label_pattern: str = r"\[[a-z0-9]{3,16}\]"
    reasoning_field: Literal["reasoning", "reasoning_content"] = "reasoning"

    # server
    coalesce: bool = False  # True: one write for all chunks that are ready at once
    recorded_requests: int = 1000
    fault_header: bool = True  # obey `x-sim-fault: {"kind": ...}`
    faults: tuple[Fault, ...] = field(default=())

    def __post_init__(self) -> None:
        room = (self.num_gpu_blocks - 1) * self.block_size
        if self.surface == "vllm" and self.max_model_len > room:
            raise ValueError(f"max_model_len {self.max_model_len} exceeds the {room} tokens of the KV cache")
