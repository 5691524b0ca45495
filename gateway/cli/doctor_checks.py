"""What the facts mean: each check turns values into one finding. No I/O here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.backends.facts import EngineFacts

State = Literal["ok", "warn", "fail"]

PROBE_TEXT = (
    "The quick brown fox — “naïve café”, 12 345.67 € and x² ≤ ½.\n\n"
    "  def f(x):\n\treturn x**2  # don't\n"
    "Tiếng Việt: bệnh viện Đa khoa. 한국어: 안녕하세요 세계. 中文：你好，世界。日本語：こんにちは、カタカナ。"
    "ไทย: สวัสดีชาวโลก. हिन्दी: नमस्ते दुनिया. العربية: مرحبا بالعالم. עברית: שלום עולם. Русский: Привет, мир! "
    "Ελληνικά: Γειά σου Κόσμε. 🙂👩‍👩‍👧 e\u0301 ﬁ\u00a0\u2028\u3000end   \r\n"
)
"""Many scripts, combining marks, white space of all kinds; no control tokens, which engines read as special."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`cost` is what the miss costs and `cure` how to end it; both empty when `state` is ok."""

    name: str
    state: State
    detail: str
    cost: str = ""
    cure: str = ""


def check_engine(facts: EngineFacts) -> Finding:
    if not facts.reachable:
        return Finding(
            "engine",
            "fail",
            facts.error or "not reachable",
            "no answers; documents and search still work",
            "start one with 'headstart engine', or set HEADSTART_ENGINE_URL",
        )
    version = f"vLLM {facts.version}" if facts.version else "reachable; it does not tell its version"
    return Finding("engine", "ok", version)


def check_model(facts: EngineFacts) -> Finding:
    if facts.model is None or facts.error:
        return Finding(
            "model",
            "fail",
            facts.error or "none is served",
            "no answers",
            "set HEADSTART_MODEL to a name that the engine serves",
        )
    others = f" (also {', '.join(name for name in facts.models if name != facts.model)})" if facts.models[1:] else ""
    return Finding("model", "ok", facts.model + others)


def check_window(facts: EngineFacts) -> Finding:
    if facts.max_model_len is None:
        return Finding(
            "context window",
            "warn",
            "the engine does not tell it",
            "prompts are not fitted to the window; long ones are refused by the engine",
            "use an engine whose /v1/models has max_model_len",
        )
    return Finding("context window", "ok", f"{facts.max_model_len:,} tokens")


def check_block(facts: EngineFacts, stable_tokens: int | None) -> Finding:
    """Whole blocks alone are reused, so the part that all questions share must fill at least one."""
    if facts.block_size is None:
        return Finding(
            "prefix block",
            "warn",
            "the engine's /metrics does not tell it",
            "what the engine holds is guessed in blocks of 16 tokens",
            "let the gateway reach the engine's /metrics, with vllm:cache_config_info",
        )
    blocks = f", {facts.num_blocks:,} of them" if facts.num_blocks else ""
    found = f"{facts.block_size} tokens{blocks}"
    if stable_tokens is None:
        return Finding("prefix block", "ok", found)
    if facts.block_size > stable_tokens:
        return Finding(
            "prefix block",
            "warn",
            f"{facts.block_size} tokens, larger than the stable prefix of {stable_tokens} tokens",
            f"two different questions share no block: {stable_tokens} tokens are computed again for each",
            f"start the engine with a --block-size of {_power_below(stable_tokens)} or less where its model allows "
            "that, or make HEADSTART_INSTRUCTIONS longer",
        )
    shared = stable_tokens // facts.block_size * facts.block_size
    return Finding("prefix block", "ok", f"{found}; {shared} of {stable_tokens} tokens of the stable prefix reused")


def check_token_ids(facts: EngineFacts) -> Finding:
    if facts.token_ids_accepted is None:
        return _not_known("token-exact prompts")
    if not facts.token_ids_accepted:
        return Finding(
            "token-exact prompts",
            "warn",
            "the engine ignores kv_transfer_params.prompt_token_ids",
            "prompts go as text: counts may drift, and control tokens in documents are the engine's to handle",
            "use vLLM 0.32 or newer",
        )
    return Finding("token-exact prompts", "ok", "token ids are taken with the chat request")


def check_prompt_details(facts: EngineFacts) -> Finding:
    if facts.prompt_tokens_details is None:
        return _not_known("cached tokens")
    if not facts.prompt_tokens_details:
        return Finding(
            "cached tokens",
            "warn",
            "usage.prompt_tokens_details is null",
            "cached and uncached tokens are unknown, so nothing proves what the prefix cache saved",
            "start vLLM with --enable-prompt-tokens-details",
        )
    return Finding("cached tokens", "ok", "reported with every answer")


def check_cache_salt(facts: EngineFacts, tenants: int) -> Finding:
    if facts.cache_salt:
        return Finding("tenant isolation", "ok", "cache_salt is taken and checked")
    if facts.cache_salt is None and facts.token_ids_accepted is None:
        return _not_known("tenant isolation")
    detail = (
        "the engine refuses cache_salt"
        if facts.cache_salt is False
        else "the engine does not check cache_salt and may ignore it"
    )
    if tenants <= 1:
        return Finding("tenant isolation", "ok", f"{detail}; one tenant needs none")
    return Finding(
        "tenant isolation",
        "warn",
        detail,
        f"{tenants} tenants may share prefix-cache hits, which timing can reveal",
        "use an engine that salts its prefix cache, such as vLLM",
    )


def check_request_metrics(facts: EngineFacts) -> Finding:
    if facts.per_request_metrics is None:
        return _not_known("request metrics")
    if not facts.per_request_metrics:
        return Finding(
            "request metrics",
            "warn",
            "no timings in the answer",
            "waiting inside the engine is counted as prefill",
            "start vLLM with --enable-per-request-metrics",
        )
    return Finding("request metrics", "ok", "queue time and prefill are told apart")


def check_tokenizer(name: str, exact: bool, local: Sequence[int] | None, engine: Sequence[int] | None) -> Finding:
    """Compares ids of `PROBE_TEXT`; None where a side cannot tokenize."""
    cure = "set HEADSTART_TOKENIZER to the folder with the served model's tokenizer.json"
    if not exact or local is None:
        return Finding(
            "tokenizer",
            "warn",
            "the served model's tokenizer is not on this machine",
            "token counts are estimates with a margin: fewer chunks fit, and prompts go as text",
            cure,
        )
    if engine is None:
        return Finding(
            "tokenizer",
            "warn",
            f"{name}; the engine has no /tokenize to compare it with",
            "a tokenizer of another model would go unnoticed until counts drift",
            "let the gateway reach the engine's /tokenize",
        )
    if list(local) != list(engine):
        split = next((i for i, (a, b) in enumerate(zip(local, engine, strict=False)) if a != b), len(local))
        return Finding(
            "tokenizer",
            "fail",
            f"{name} gives {len(local)} ids, the engine {len(engine)}; they part at number {split}",
            "prompts would reach the model garbled",
            cure,
        )
    return Finding("tokenizer", "ok", f"{name}: {len(local)} ids of a text in many scripts equal the engine's")


def _not_known(name: str) -> Finding:
    return Finding(
        name,
        "warn",
        "not known: the engine did not answer the probe",
        "the gateway acts as if the engine could not",
        "ask again when the engine is less busy",
    )


def _power_below(tokens: int) -> int:
    """The largest power of two that is not above `tokens`, 16 at least: engines have no smaller blocks."""
    return max(16, 1 << (tokens.bit_length() - 1)) if tokens > 0 else 16
