"""Every setting, from `HEADSTART_*` variables or `headstart.toml`; the only place that reads the environment."""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from gateway.endpoints import parse_endpoints
from gateway.event_sources import check_setting


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/headstart`, or `~/.cache/headstart`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headstart"


def process_environment() -> dict[str, str]:
    """A copy of this process's environment, for the processes that it starts."""
    return dict(os.environ)


def what_is_wrong(error: Exception) -> str:
    """In one line, which settings are wrong and how, without their values; of another error, what it says."""
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(
        f"{'.'.join(str(part) for part in item['loc']) or 'settings'}: "
        f"{'there is no such setting' if item['type'] == 'extra_forbidden' else item['msg']}"
        for item in error.errors()
    )


class Settings(BaseSettings):
    """Frozen. A variable wins over the file; the file over the default. docs/settings.md lists all."""

    model_config = SettingsConfigDict(
        env_prefix="HEADSTART_", toml_file="headstart.toml", frozen=True, extra="forbid", hide_input_in_errors=True
    )

    # where the gateway listens
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8080, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    no_auth: bool = Field(False, description="Allow an address other than loopback without API keys.")
    api_keys_file: Path | None = Field(
        None, description="File of lines `TENANT SHA256_HEX_OF_KEY`; `headstart key TENANT` makes one."
    )
    api_keys: str = Field("", description="The same entries, separated by commas, as `TENANT:SHA256_HEX`.")
    salt_secret: str = Field(
        "", description="Secret of the tenants' cache salts; empty keeps a random one in the data folder."
    )
    share_prefix_cache: bool = Field(
        False,
        description="Tenants share the engine's prefix cache: more reuse of common documents, but by its time a "
        "tenant can tell that another has sent the same text.",
    )
    max_in_flight: int = Field(2048, ge=1, description="Chat requests in progress; beyond it 503 with Retry-After.")
    max_body_bytes: int = Field(16 * 2**20, ge=1024, description="Largest JSON request body, in bytes.")
    max_upload_bytes: int = Field(100 * 2**20, ge=1024, description="Largest uploaded file, in bytes.")
    body_timeout_s: float = Field(
        30.0,
        gt=0,
        description="Longest wait for a request body, in seconds; a second more for each 4 KiB that has come.",
    )

    # the engine
    engine_url: str = Field(
        "http://127.0.0.1:8000",
        description="Base URL of the vLLM server, without `/v1`; several of one model separated by commas, each "
        "optionally `NAME=URL`.",
    )
    engine_api_key: str = Field("", description="Bearer key for the engine, when it asks for one.")
    model: str = Field("", description="Served model's name; empty takes the engine's first.")
    tokenizer: str = Field(
        "",
        description="Folder or name of the served model's tokenizer; empty asks the engine and the model cache.",
    )
    connect_timeout_s: float = Field(5.0, gt=0, description="Limit for connecting to the engine, in seconds.")
    first_token_timeout_s: float = Field(120.0, gt=0, description="Limit from sending to the first byte, in seconds.")
    between_tokens_timeout_s: float = Field(
        30.0, gt=0, description="Limit between two reads of a stream, in seconds."
    )
    answer_timeout_s: float = Field(
        600.0, gt=0, description="Limit for a whole answer that is not streamed, in seconds."
    )
    kv_events: str = Field(
        "auto",
        description="KV events of the engine: `auto` follows them where it offers them, `off` does not; or "
        "`tcp://HOST:PORT`, and after a comma that of the replay socket; `*` is the engine's host.",
    )
    probe_interval_s: float = Field(5.0, gt=0, description="Time between health probes of the engine, in seconds.")
    dns_refresh_s: float = Field(
        10.0,
        gt=0,
        description="Time between look-ups of the names in `engine_url`, in seconds; each address is a replica.",
    )

    # data
    data_dir: Path = Field(Path("data"), description="Folder of the database, the uploaded files and the indexes.")
    cache_dir: Path = Field(
        default_factory=default_cache_dir, description="Folder of prepared models; safe to delete."
    )
    redis_url: str = Field(
        "", description="Redis for transcripts, query embeddings and what gateways tell each other; empty: memory."
    )
    memory_store_bytes: int = Field(
        256 * 2**20,
        ge=2**20,
        description="Bound of the in-memory store, in bytes; the least recently used leaves.",
    )
    transcript_ttl_s: float = Field(
        86_400.0, gt=0, description="Life of a transcript after its last turn, in seconds."
    )
    embedding_ttl_s: float = Field(3_600.0, gt=0, description="Life of a cached query embedding, in seconds.")

    # retrieval
    embedding_model: str = Field(
        "packaged", description="Folder or name for sentence-transformers; `packaged` is all-MiniLM-L6-v2."
    )
    index: Literal["flat", "hnsw"] = Field("flat", description="FAISS index: exact `flat` or approximate `hnsw`.")
    chunk_tokens: int = Field(256, ge=32, le=4096, description="Most tokens of a chunk, by the served tokenizer.")
    chunk_overlap_tokens: int = Field(32, ge=0, description="Tokens that neighbouring chunks share.")
    top_k: int = Field(5, ge=1, le=50, description="Chunks a question gets when the request does not say.")
    previous_turn_weight: float = Field(
        0.3, ge=0, lt=1, description="Weight of the previous user turn in the query of a conversation."
    )

    # prompts
    instructions: str = Field(
        "Use the passages to answer the question. Answer with the words of the passages, in full sentences, and name "
        "the label of each passage that you use in square brackets. If the passages do not hold the answer, say so.",
        description="The gateway's part of the system message of retrieval requests.",
    )
    rendering: Literal["auto", "kept", "stripped"] = Field(
        "auto",
        description="Past turns with their chunks (`kept`), question and answer alone (`stripped`), or as the "
        "fitted model of the engine says (`auto`).",
    )
    chunk_order: Literal["reuse", "relevance_last", "relevance_first", "label"] = Field(
        "reuse", description="Order of the chunks in the prompt; `reuse` is what the engine's cache serves best."
    )
    pin_last: int = Field(
        0,
        ge=0,
        le=2,
        description="The most relevant chunks that are held back for the last places, whatever the order.",
    )
    evidence_lines: int = Field(1, ge=0, le=10, description="Sentences quoted before the question; 0 turns them off.")
    volatile: Literal["report", "move", "off"] = Field(
        "report",
        description="System texts that change from request to request: reported, or their changing lines moved "
        "behind the chunks (`move`).",
    )
    min_answer_tokens: int = Field(
        256, ge=1, description="Room kept for the answer when `max_tokens` is not given, in tokens."
    )

    # latency
    ttft_budget_ms: float = Field(
        0.0, ge=0, le=3_600_000, description="TTFT budget of requests that name none, in milliseconds; 0 is none."
    )
    budget_policy: Literal["best_effort", "strict"] = Field(
        "best_effort",
        description="When nothing fits the budget: answer from the smallest plan (`best_effort`), or refuse "
        "(`strict`).",
    )
    safety_quantile: float = Field(
        0.95, ge=0.5, le=0.999, description="Probability with which a predicted TTFT is to be kept."
    )
    calibrate: bool = Field(
        True, description="Measure an engine that is met for the first time, for a few seconds while it is idle."
    )
    pacing: bool = Field(
        True, description="Release prefills in turn, most urgent and shortest first; off sends all at once."
    )
    max_queued: int = Field(
        512, ge=1, description="Requests that wait for their prefill; beyond it 503 with the predicted wait."
    )

    # history
    summary: Literal["engine", "extract", "off"] = Field(
        "engine",
        description="How old turns are folded: the engine summarises, sentences are extracted, or they are only cut.",
    )
    prewarm: bool = Field(
        True,
        description="Compute the front of a conversation's next prompt while the engine is idle, where it changed.",
    )
    fold_high_tokens: int = Field(
        0, ge=0, description="History beyond this is folded, in tokens; 0 derives it from budget and window."
    )
    fold_low_tokens: int = Field(
        0, ge=0, description="History that a fold leaves, in tokens; 0 derives it from the high mark."
    )

    # operations
    log_format: Literal["console", "json"] = Field("console", description="Form of the log lines.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")
    calls_kept: int = Field(1000, ge=1, description="Recent requests kept in memory for `headstart calls`.")

    @field_validator("engine_url")
    @classmethod
    def engine_url_is_plain(cls, url: str) -> str:
        """The message never repeats the value: it may hold a secret."""
        parse_endpoints(url)
        return url

    @field_validator("kv_events")
    @classmethod
    def kv_events_are_addresses(cls, value: str) -> str:
        return check_setting(value)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)
