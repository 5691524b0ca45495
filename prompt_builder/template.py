"""The served model's chat template, reduced to the scaffolding between the contents of messages."""

import json
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import orjson

from prompt_builder.types import Role

# What Llama's own template falls back to. A date that moved would move every prompt's first block with it.
FIXED_DATE = datetime(2024, 7, 26)
_SENTINEL = re.compile(r"Qx(\d{5})hsContentZ")
TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class TemplateRefused(Exception):
    """The template cannot give scaffolding for these roles; the message says why."""


class NoTemplate(Exception):
    """The model folder holds no chat template, or one that does not parse."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    reason: str


class ChatTemplate:
    """A Jinja chat template as transformers runs it, in a sandbox.

    `scaffold` renders it around sentinels and cuts there, so that contents never pass through the template:
    what it would do to them (trim, escape, refuse) does not happen. `holds_clock`: it asks for the date;
    it is given `now`, which never moves, and the fact is there to be reported. `reads_names`: a message's `name`
    changes what it writes. Usable from any thread.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        now: datetime = FIXED_DATE,
        cached_role_tuples: int = 128,
    ) -> None:
        environment = _environment(now)
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise NoTemplate(f"The chat template does not parse: {error}") from error
        self.holds_clock = any(name.name == "strftime_now" for name in tree.find_all(jinja2.nodes.Name))
        self._special_tokens = dict(special_tokens or {})
        self._max_cached = cached_role_tuples
        self._cached: OrderedDict[tuple[Role, ...], tuple[str, ...] | _Refusal] = OrderedDict()
        self._lock = Lock()
        self.accepts_system = self._accepts_system()
        self.reads_names = self._reads_names()

    @classmethod
    def load(cls, folder: Path, *, now: datetime = FIXED_DATE) -> "ChatTemplate":
        """From `chat_template.jinja` or `tokenizer_config.json` of a model folder; raises NoTemplate."""
        config_file, jinja_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        try:
            config = orjson.loads(config_file.read_bytes()) if config_file.exists() else {}
            own = jinja_file.read_text("utf-8") if jinja_file.exists() else None
        except (OSError, ValueError) as error:
            raise NoTemplate(f"The chat template cannot be read: {error}") from error
        source = own or _named_default(config.get("chat_template"))
        if not source:
            raise NoTemplate("The model's folder holds no chat template.")
        return cls(source, _special_tokens(config), now=now)

    def scaffold(self, roles: Sequence[Role]) -> tuple[str, ...]:
        """The literal pieces around contents of these roles: one before each, and one that opens the answer.

        Raises TemplateRefused when the template raises, drops, repeats or reorders a content.
        """
        key = tuple(roles)
        with self._lock:
            found = self._cached.get(key)
            if found is not None:
                self._cached.move_to_end(key)
        if found is None:
            found = self._scaffold(key)
            with self._lock:
                self._cached[key] = found
                while len(self._cached) > self._max_cached:
                    self._cached.popitem(last=False)
        if isinstance(found, _Refusal):
            raise TemplateRefused(found.reason)
        return found

    def _scaffold(self, roles: tuple[Role, ...]) -> tuple[str, ...] | _Refusal:
        sentinels = [f"Qx{place:05d}hsContentZ" for place in range(len(roles))]
        messages = [{"role": role, "content": text} for role, text in zip(roles, sentinels, strict=True)]
        try:
            rendered = self._template.render(
                messages=messages,
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except Exception as error:  # a template may fail in any way: it is code that came with a model
            return _Refusal(f"The chat template refuses roles {_short(roles)}: {error}")
        parts = _SENTINEL.split(rendered)
        places = [int(place) for place in parts[1::2]]
        if places != list(range(len(roles))):
            times = Counter(places)
            wrong = next((place for place in range(len(roles)) if times[place] != 1 or places[place] != place), 0)
            return _Refusal(f"The chat template drops, repeats or moves a {roles[wrong]} message.")
        # Long histories repeat a few pieces thousands of times: each is kept once.
        distinct: dict[str, str] = {}
        return tuple(distinct.setdefault(piece, piece) for piece in parts[::2])

    def _reads_names(self) -> bool:
        name = "Qx99999hsNameZ"
        messages = [{"role": "user", "content": "one", "name": name}]
        try:
            return name in self._template.render(
                messages=messages, add_generation_prompt=True, **self._special_tokens
            )
        except Exception:  # a template that fails here fails without the name as well
            return False

    def _accepts_system(self) -> bool:
        """Whether a system message stays where it is put, in a first turn and in a later one."""
        first: tuple[Role, ...] = ("system", "user")
        try:
            self.scaffold(first)
            self.scaffold((*first, "assistant", "user"))
        except TemplateRefused:
            return False
        return True


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 reads

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: datetime) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _clock(now)
    return environment


def _clock(now: datetime) -> Callable[[str], str]:
    return now.strftime


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _named_default(template: Any) -> str | None:
    """Older files hold a list of named templates."""
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in TOKEN_NAMES:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


def _short(roles: tuple[Role, ...]) -> str:
    shown = ", ".join(roles[:6])
    return shown if len(roles) <= 6 else f"{shown}, … ({len(roles)} messages)"
