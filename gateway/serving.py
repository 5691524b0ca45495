"""Everything that follows from which model the engine serves: tokenizer, template, planner, builder."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.backends.facts import EngineFacts
from gateway.settings import Settings
from prompt_builder.builder import PromptBuilder
from prompt_builder.labels import Renderer
from prompt_builder.memo import MemoTokenizer
from prompt_builder.planner import Planner
from prompt_builder.template import ChatTemplate, NoTemplate
from prompt_builder.tokenizer import EstimateTokenizer, NoTokenizer, load_tokenizer
from prompt_builder.types import Message, Tokenizer
from retrieval.types import RenderedChunk

log = logging.getLogger("headstart.serving")

DEFAULT_BLOCK_TOKENS = 16
_TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"]
_HUB_TIMEOUT_S = 5.0

_Source = tuple[tuple[str, int, int], ...]
"""The files that a tokenizer was made of, each with its time and size."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A feature that the engine or the machine does not offer, what that costs, and the cure."""

    feature: str
    cost: str
    cure: str


@dataclass(frozen=True, slots=True)
class Serving:
    """Replaced whole when the engine's facts change; a request uses one from beginning to end."""

    facts: EngineFacts
    tokenizer: Tokenizer
    template: ChatTemplate | None
    renderer: Renderer
    planner: Planner
    builder: PromptBuilder
    missing: tuple[Missing, ...]
    source: _Source = ()

    @property
    def token_exact(self) -> bool:
        """Whether prompts go to the engine as token ids."""
        return self.facts.token_ids_accepted is True and self.tokenizer.exact and self.template is not None


def unknown_serving(settings: Settings) -> Serving:
    """Before the engine has been asked; reads no files."""
    return _serving(settings, EngineFacts(reachable=False), EstimateTokenizer(), None)


def make_serving(settings: Settings, facts: EngineFacts, before: Serving | None = None) -> Serving:
    """Reads tokenizer and template files, or fetches them: call it off the event loop.

    `before` is the last one: an engine that comes and goes costs no new tokenizer while its files are the same, and
    no memory of prompts while its blocks are.
    """
    folder = next(iter(_tokenizer_folders(settings, facts)), None)
    source = _source(folder)
    if before is not None and source == before.source and before.tokenizer.exact:
        return _with_facts(settings, facts, before)
    tokenizer: Tokenizer = MemoTokenizer(EstimateTokenizer())
    template: ChatTemplate | None = None
    if folder is not None:
        try:
            tokenizer = MemoTokenizer(load_tokenizer(folder))
            template = ChatTemplate.load(folder)
        except (NoTokenizer, NoTemplate, OSError, ValueError) as error:
            log.warning("the tokenizer in %s cannot be used: %s", folder, error)
    return replace(_serving(settings, facts, tokenizer, template), source=source)


def _source(folder: Path | None) -> _Source:
    """Another one whenever a file of the tokenizer in the folder was written."""
    found: list[tuple[str, int, int]] = []
    for path in [] if folder is None else [folder / name for name in _TOKENIZER_FILES]:
        try:
            status = path.stat()
        except OSError:
            continue
        found.append((str(path), status.st_mtime_ns, status.st_size))
    return tuple(found)


def _with_facts(settings: Settings, facts: EngineFacts, before: Serving) -> Serving:
    made = _serving(settings, facts, before.tokenizer, before.template)
    if made.builder.block_size != before.builder.block_size:
        return replace(made, source=before.source, renderer=before.renderer, planner=before.planner)
    return replace(before, facts=facts, missing=made.missing)


def _serving(settings: Settings, facts: EngineFacts, tokenizer: Tokenizer, template: ChatTemplate | None) -> Serving:
    block_tokens = facts.block_size or DEFAULT_BLOCK_TOKENS
    return Serving(
        facts=facts,
        tokenizer=tokenizer,
        template=template,
        renderer=Renderer(tokenizer),
        planner=Planner(
            tokenizer,
            template,
            settings.instructions,
            rendering=settings.rendering,
            chunk_order=settings.chunk_order,
            evidence_lines=settings.evidence_lines,
            pin_last=settings.pin_last,
        ),
        builder=PromptBuilder(tokenizer, template, settings.instructions, block_tokens),
        missing=(*_missing(facts, tokenizer, template), *_large_blocks(facts, settings, tokenizer, template)),
    )


def _tokenizer_folders(settings: Settings, facts: EngineFacts) -> Iterator[Path]:
    """Where the served model's tokenizer may lie, best first; only folders that hold one."""
    named = [settings.tokenizer] if settings.tokenizer else [facts.root, facts.model]
    models = settings.cache_dir / "models"
    for name in named:
        if not name:
            continue
        for folder in (Path(name).expanduser(), models / Path(name).name, *_hub_folders(name)):
            if (folder / "tokenizer.json").is_file():
                yield folder
    # Only a name that the operator wrote is asked for on the network, never one that an engine tells.
    yield from _downloaded(settings.tokenizer)


def _hub_folders(name: str) -> Iterator[Path]:
    """The local cache of the model hub; nothing is downloaded."""
    if name.count("/") != 1 or name.startswith(("/", ".", "~")):
        return
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "tokenizer.json")
    except HFValidationError:
        return
    if isinstance(found, str):
        yield Path(found).parent


def _downloaded(name: str) -> Iterator[Path]:
    """The tokenizer's files from the model hub, a few megabytes, kept in its local cache."""
    if name.count("/") != 1 or name.startswith(("/", ".", "~")):
        return
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield Path(snapshot_download(name, allow_patterns=_TOKENIZER_FILES, etag_timeout=_HUB_TIMEOUT_S))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        log.warning("the tokenizer '%s' cannot be had from the model hub: %s", name, type(error).__name__)


def _missing(facts: EngineFacts, tokenizer: Tokenizer, template: ChatTemplate | None) -> Iterator[Missing]:
    if not facts.reachable:
        yield Missing(
            "engine", "no answers; documents and search work", "start the engine or set HEADSTART_ENGINE_URL"
        )
        return
    if facts.error:
        yield Missing("model", "no answers", facts.error)
    if not tokenizer.exact:
        yield Missing(
            "tokenizer",
            "counts are estimates and prompts go as text: the prefix may differ from what the engine holds, and "
            "control tokens that a document spells out are control tokens to the engine",
            "set HEADSTART_TOKENIZER to the folder of the served model's tokenizer.json",
        )
    elif template is None:
        yield Missing("chat template", "prompts go as text", "put chat_template.jinja beside tokenizer.json")
    elif template.holds_clock:
        yield Missing(
            "date in the chat template",
            "the model is told one fixed date, because a new one each day would end every cached prefix",
            "say the date in a message where the model needs it",
        )
    if facts.token_ids_accepted is False:
        yield Missing(
            "token ids in chat", "prompts go as text and the engine tokenizes them", "use vLLM 0.32 or newer"
        )
    if facts.max_model_len is None:
        yield Missing("context window", "prompts are not fitted to the window", "serve max_model_len in /v1/models")
    if facts.prompt_tokens_details is False:
        yield Missing(
            "cached tokens",
            "cached and uncached tokens are unknown",
            "start vLLM with --enable-prompt-tokens-details",
        )
    if facts.prefix_caching is False:
        yield Missing("prefix caching", "every prompt is computed whole", "start vLLM with --enable-prefix-caching")
    if facts.cache_salt is False:
        yield Missing("cache salt", "tenants share the engine's prefix cache", "use an engine that takes cache_salt")
    if facts.per_request_metrics is False:
        yield Missing(
            "request metrics",
            "queueing in the engine counts as prefill",
            "start vLLM with --enable-per-request-metrics",
        )


def _large_blocks(
    facts: EngineFacts, settings: Settings, tokenizer: Tokenizer, template: ChatTemplate | None
) -> Iterator[Missing]:
    """Only whole blocks are reused: a front that is shorter than one is computed anew in every request."""
    if not facts.reachable or facts.block_size is None or not tokenizer.exact or template is None:
        return
    front = PromptBuilder(tokenizer, template, "", facts.block_size).passthrough(
        [Message("system", settings.instructions)], ""
    )
    if facts.block_size > front.tokens:
        yield Missing(
            "small blocks",
            f"the engine's blocks have {facts.block_size} tokens and the instructions with their scaffolding "
            f"{front.tokens}: unless a system text fills the block, the front of a prompt is never reused",
            "start vLLM with a smaller --block-size where the model allows it, or give a longer system text",
        )


class LiveRenderer:
    """The chunk renderer of whatever model is served now; ingestion holds this one for good."""

    def __init__(self, serving: Serving) -> None:
        self._renderer = serving.renderer

    def follow(self, serving: Serving) -> None:
        self._renderer = serving.renderer

    @property
    def fingerprint(self) -> str:
        return self._renderer.fingerprint

    def count(self, text: str) -> int:
        return self._renderer.count(text)

    def render(self, title: str, text: str) -> RenderedChunk:
        return self._renderer.render(title, text)
