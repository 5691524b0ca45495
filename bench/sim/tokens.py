"""Tokenizers of the simulated engine: a served model's own, or plain bytes."""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

Piece = tuple[str, tuple[int, ...]]


class SimTokenizer(Protocol):
    """`encode` reads control tokens in text as control tokens, as the engine's own endpoints do."""

    eos_id: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def render(self, messages: list[dict[str, Any]], body: dict[str, Any]) -> list[int]: ...

    def pieces(self, text: str, chunk_chars: int | None) -> tuple[Piece, ...]:
        """The text in the pieces in which a stream would show it, with the ids of each."""
        ...


def text_of(content: Any) -> str:
    """The text of a message's `content`, a string or a list of parts."""
    if isinstance(content, list):
        return "\n".join(part.get("text", "") for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


class ByteTokenizer:
    """`bytes_per_token` UTF-8 bytes an id, in base 257 so that a short last group stays readable.

    Control tokens are the ids just above. With one byte an id, the ids of a concatenation are the
    concatenation of the ids.
    """

    controls = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

    def __init__(self, bytes_per_token: int = 1) -> None:
        self._width = bytes_per_token
        first = 257**bytes_per_token
        self._control_ids = {text: first + i for i, text in enumerate(self.controls)}
        self._control_texts = {i: text.encode() for text, i in self._control_ids.items()}
        self._split = re.compile("(" + "|".join(map(re.escape, self.controls)) + ")")
        self.eos_id = self._control_ids["<|im_end|>"]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._split.split(text):
            if part in self._control_ids:
                ids.append(self._control_ids[part])
            elif self._width == 1:
                ids.extend(byte + 1 for byte in part.encode("utf-8", "surrogatepass"))
            else:
                data = part.encode("utf-8", "surrogatepass")
                ids.extend(self._pack(data[i : i + self._width]) for i in range(0, len(data), self._width))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self._control_texts.get(i) or self._unpack(i) for i in ids).decode("utf-8", "replace")

    def render(self, messages: list[dict[str, Any]], body: dict[str, Any]) -> list[int]:
        text = "".join(f"<|im_start|>{m['role']}\n{text_of(m.get('content'))}<|im_end|>\n" for m in messages)
        if body.get("tools"):
            text = f"<|im_start|>tools\n{json.dumps(body['tools'], sort_keys=True)}<|im_end|>\n{text}"
        if body.get("add_generation_prompt", True):
            text += "<|im_start|>assistant\n"
        return self.encode(text)

    def pieces(self, text: str, chunk_chars: int | None) -> tuple[Piece, ...]:
        if chunk_chars is None:
            parts = re.findall(r"\s*\S+|\s+$", text)
        else:
            parts = [text[i : i + chunk_chars] for i in range(0, len(text), chunk_chars)]
        return tuple((part, tuple(self.encode(part))) for part in parts)

    def _pack(self, group: bytes) -> int:
        value = 0
        for byte in reversed(group):
            value = value * 257 + byte + 1
        return value

    def _unpack(self, value: int) -> bytes:
        group = bytearray()
        while value > 0 and len(group) < self._width:
            value, digit = divmod(value, 257)
            group.append(max(0, digit - 1))
        return bytes(group)


class ModelTokenizer:
    """A model folder's `tokenizer.json` and chat template."""

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        config = json.loads((model_dir / "tokenizer_config.json").read_text("utf-8"))
        template_file = model_dir / "chat_template.jinja"
        template = template_file.read_text("utf-8") if template_file.exists() else config["chat_template"]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_template_error
        self._template = environment.from_string(template)
        self._variables = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token")}
        eos_id = self._tokenizer.token_to_id(self._variables["eos_token"])
        if eos_id is None:
            raise ValueError(f"{model_dir} names no eos_token that its tokenizer knows")
        self.eos_id = int(eos_id)
        self.pieces = lru_cache(maxsize=256)(self._pieces)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def render(self, messages: list[dict[str, Any]], body: dict[str, Any]) -> list[int]:
        flat = [
            m if isinstance(m.get("content"), str) else {**m, "content": text_of(m.get("content"))} for m in messages
        ]
        text = self._template.render(
            messages=flat,
            tools=body.get("tools"),
            add_generation_prompt=body.get("add_generation_prompt", True),
            **self._variables,
        )
        return self.encode(text)

    def _pieces(self, text: str, chunk_chars: int | None) -> tuple[Piece, ...]:
        pieces: list[Piece] = []
        held: list[int] = []
        for token_id in self.encode(text):
            held.append(token_id)
            shown = self.decode(held)
            # A character that is not complete yet is held back, as the engine's detokenizer does.
            if not shown.endswith("\ufffd") and len(shown) >= (chunk_chars or 0):
                pieces.append((shown, tuple(held)))
                held = []
        if held:
            pieces.append((self.decode(held), tuple(held)))
        return tuple(pieces)


def _token_text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token or "")


def _raise_template_error(message: str) -> None:
    raise ValueError(message)


def load_tokenizer(model_dir: Path | None, bytes_per_token: int) -> SimTokenizer:
    """The model's tokenizer, or bytes when there is no model."""
    return ModelTokenizer(model_dir) if model_dir is not None else ByteTokenizer(bytes_per_token)
