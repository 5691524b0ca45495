"""The served model's tokenizer: exact ids, quickly, in which content can never become a control token."""

import re
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from sys import getsizeof
from threading import Lock
from typing import Any

import orjson
import tokenizers

from prompt_builder.encoding import ByteEncoding, NotByteLevel, byte_encoding
from prompt_builder.probe import PROBE_TEXTS
from prompt_builder.types import Tokenizer

CACHE_BYTES = 64 * 2**20


class NoTokenizer(Exception):
    """`tokenizer.json` is not there or is not one; the message says which."""


def load_tokenizer(source: Path, cache_bytes: int = CACHE_BYTES) -> Tokenizer:
    """The tokenizer of a model folder (or of a `tokenizer.json` itself).

    Takes about half a second: a tiktoken encoding is built and used if it gives the ids of `tokenizers` on a probe
    of many scripts and on the vocabulary itself; otherwise `tokenizers` is used. `cache_bytes` bounds the
    memory of encoded segments. Raises NoTokenizer.
    """
    path = source / "tokenizer.json" if source.is_dir() else source
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise NoTokenizer(f"{path.name} cannot be read: {error.strerror}") from error
    fingerprint = sha256(raw).hexdigest()[:16]
    try:
        config = orjson.loads(raw)
        reference = ReferenceTokenizer(config, fingerprint, cache_bytes)
    except Exception as error:  # the library raises plain Exception for a file that it cannot parse
        raise NoTokenizer(f"{path.name} is not a tokenizer: {error}") from error
    try:
        encoding = byte_encoding(fingerprint, config, reference.control_ids)
    except (NotByteLevel, ValueError):  # ValueError: a regular expression that tiktoken's engine refuses
        return reference
    fast = FastTokenizer(encoding, reference, fingerprint, cache_bytes)
    return fast if agrees(fast, reference, config) else reference


class ReferenceTokenizer:
    """`tokenizers`, with and without its control tokens.

    A control token is any added token that is not mere white space: also those not marked as special, such as
    `<tool_call>`, must not come out of a document.
    """

    name = "tokenizers"
    exact = True

    def __init__(self, config: dict[str, Any], fingerprint: str, cache_bytes: int = CACHE_BYTES) -> None:
        self.fingerprint = f"{self.name}:{fingerprint}"
        added = config.get("added_tokens") or []
        control = [token for token in added if token["content"].strip()]
        self.control_ids = frozenset(int(token["id"]) for token in control)
        spellings = sorted((re.escape(token["content"]) for token in control), key=len, reverse=True)
        self._control_text = re.compile("|".join(spellings) or r"(?!)")
        self._scaffold = _tokenizer_of(config, added)
        self._content = _tokenizer_of(config, [token for token in added if token not in control])
        self._encoded = EncodedCache(cache_bytes)
        self._scaffolds = EncodedCache(cache_bytes // 16)

    def encode(self, text: str) -> tuple[int, ...]:
        return self._encoded.get(text, self.encode_uncached)

    def encode_uncached(self, text: str) -> tuple[int, ...]:
        """As `encode`, without the cache."""
        text = _without_surrogates(text)
        ids = self._content.encode(text, add_special_tokens=False).ids
        if self.control_ids.isdisjoint(ids):
            return tuple(ids)
        return tuple(token_id for part in self._broken(text) for token_id in self._ids_but_control(part))

    def encode_scaffold(self, text: str) -> tuple[int, ...]:
        return self._scaffolds.get(text, lambda t: tuple(self._scaffold.encode(t, add_special_tokens=False).ids))

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def _broken(self, text: str) -> list[str]:
        """Cut inside each control token, for models (unigram, say) whose vocabulary spells them out."""
        cuts = [match.start() + 1 for match in self._control_text.finditer(text)]
        return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def _ids_but_control(self, text: str) -> tuple[int, ...]:
        ids = self._content.encode(text, add_special_tokens=False).ids
        return tuple(token_id for token_id in ids if token_id not in self.control_ids)


class FastTokenizer:
    """A tiktoken encoding for content; the reference for scaffolding and for bytes that the model lacks."""

    name = "tiktoken"
    exact = True

    def __init__(
        self, encoding: ByteEncoding, reference: ReferenceTokenizer, fingerprint: str, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self.fingerprint = f"{self.name}:{fingerprint}"
        self._bytes = encoding
        self._reference = reference
        self._encoded = EncodedCache(cache_bytes)

    def encode(self, text: str) -> tuple[int, ...]:
        return self._encoded.get(text, self.encode_uncached)

    def encode_uncached(self, text: str) -> tuple[int, ...]:
        """As `encode`, without the cache."""
        # Lone surrogates tiktoken reads as U+FFFD by itself; a long text is not searched for them before.
        ids = self._bytes.encoding.encode(self._bytes.normalize(text))
        if max(ids, default=0) >= self._bytes.first_unknown:
            return self._reference.encode_uncached(text)
        return tuple(ids)

    def encode_scaffold(self, text: str) -> tuple[int, ...]:
        return self._reference.encode_scaffold(text)

    def count(self, text: str) -> int:
        return len(self.encode(text))


class EstimateTokenizer:
    """For an engine whose tokenizer is not known: counts, and has no ids.

    `encode` and `encode_scaffold` return no ids. `count` errs upwards on prose: a token for every three letters
    of a word, every digit, sign and run of spaces, and every byte of other scripts.
    """

    name = "estimate"
    fingerprint = "estimate:1"
    exact = False

    def encode(self, text: str) -> tuple[int, ...]:
        return ()

    def encode_scaffold(self, text: str) -> tuple[int, ...]:
        return ()

    def count(self, text: str) -> int:
        ascii_text = text.encode("ascii", "ignore").decode("ascii")
        other_bytes = len(_without_surrogates(text).encode()) - len(ascii_text)
        return other_bytes + len(_ESTIMATED.findall(ascii_text))


class EncodedCache:
    """Ids by text, bounded in bytes; the least recently used leaves. Safe to share between threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._lock = Lock()

    @property
    def bytes_held(self) -> int:
        return self._bytes

    def get(self, text: str, encode: Callable[[str], tuple[int, ...]]) -> tuple[int, ...]:
        with self._lock:
            ids = self._entries.get(text)
            if ids is not None:
                self._entries.move_to_end(text)
                return ids
        ids = encode(text)
        cost = _entry_bytes(text, ids)
        if cost > self._max_bytes // 8:
            return ids
        with self._lock:
            if text not in self._entries:
                self._entries[text] = ids
                self._bytes += cost
            while self._bytes > self._max_bytes:
                self._bytes -= _entry_bytes(*self._entries.popitem(last=False))
        return ids


def agrees(fast: FastTokenizer, reference: ReferenceTokenizer, config: dict[str, Any]) -> bool:
    """Whether both give the same ids on the probe texts and on up to 20,000 words of the vocabulary."""
    vocabulary = config["model"]["vocab"]
    words = [word.replace("Ġ", " ").replace("Ċ", "\n") for word in vocabulary]
    step = len(words) // 20_000 + 1
    probes = [*PROBE_TEXTS, "\n".join(PROBE_TEXTS), " ".join(words[::step])]
    return all(fast.encode_uncached(probe) == reference.encode_uncached(probe) for probe in probes)


_ESTIMATED = re.compile(r"[A-Za-z]{1,3}|[ \t]{2,}|[^A-Za-z ]")


def _tokenizer_of(config: dict[str, Any], added_tokens: list[Any]) -> tokenizers.Tokenizer:
    # Truncation, padding and post-processing belong to encoding whole prompts, never to a segment.
    plain = config | {"added_tokens": added_tokens, "post_processor": None, "truncation": None, "padding": None}
    return tokenizers.Tokenizer.from_str(orjson.dumps(plain).decode())


def _without_surrogates(text: str) -> str:
    """Lone surrogates, which no UTF-8 text can hold, become U+FFFD."""
    if text.isascii() or not _SURROGATES.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


_SURROGATES = re.compile("[\ud800-\udfff]")


def _entry_bytes(text: str, ids: tuple[int, ...]) -> int:
    return 200 + getsizeof(text) + 36 * len(ids)
