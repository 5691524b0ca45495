"""Texts that are tokenized once, however often planner and builder meet them."""

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

from prompt_builder.types import Tokenizer

Value = TypeVar("Value")

MOST_TOKENS = 500_000

# What an entry costs beside its tokens (key, links, tuple header), in tokens of about 40 bytes.
_ENTRY_TOKENS = 8


class MemoTokenizer:
    """A tokenizer that remembers ids and counts by text; the least recently used leave beyond `most_tokens`.

    A long conversation states every past message again at every turn; only its last ones are new. The texts count
    against the bound as one token for every eight characters. Usable from any thread.
    """

    def __init__(self, tokenizer: Tokenizer, most_tokens: int = MOST_TOKENS) -> None:
        self._tokenizer = tokenizer
        self._texts: _Memo[tuple[int, ...]] = _Memo(tokenizer.encode, len, most_tokens)
        self._scaffolds: _Memo[tuple[int, ...]] = _Memo(tokenizer.encode_scaffold, len, most_tokens // 8)
        self._counts: _Memo[int] | None = None
        if not tokenizer.exact:
            self._counts = _Memo(tokenizer.count, lambda count: 1, most_tokens // 8)

    @property
    def name(self) -> str:
        return self._tokenizer.name

    @property
    def fingerprint(self) -> str:
        return self._tokenizer.fingerprint

    @property
    def exact(self) -> bool:
        return self._tokenizer.exact

    @property
    def tokens_held(self) -> int:
        """What counts against the bound, of contents and scaffolding."""
        return self._texts.held + self._scaffolds.held

    def encode(self, text: str) -> tuple[int, ...]:
        # An estimate has no ids: there is nothing to remember.
        return self._texts.get(text) if self._counts is None else self._tokenizer.encode(text)

    def encode_scaffold(self, text: str) -> tuple[int, ...]:
        return self._scaffolds.get(text)

    def count(self, text: str) -> int:
        """An estimate's count is its own, it has no ids."""
        return len(self._texts.get(text)) if self._counts is None else self._counts.get(text)


class _Memo(Generic[Value]):
    """A bounded LRU of what `compute` gives; two threads may compute the same text, and agree."""

    def __init__(self, compute: Callable[[str], Value], size: Callable[[Value], int], most_tokens: int) -> None:
        self._compute = compute
        self._size = size
        self._most = most_tokens
        self._values: OrderedDict[str, Value] = OrderedDict()
        self._lock = Lock()
        self.held = 0

    def get(self, text: str) -> Value:
        with self._lock:
            value = self._values.get(text)
            if value is not None:
                self._values.move_to_end(text)
                return value
        value = self._compute(text)
        cost = self._cost(text, value)
        if cost > self._most // 8:
            return value
        with self._lock:
            if text not in self._values:
                self._values[text] = value
                self.held += cost
            while self.held > self._most:
                self.held -= self._cost(*self._values.popitem(last=False))
        return value

    def _cost(self, text: str, value: Value) -> int:
        return _ENTRY_TOKENS + len(text) // 8 + self._size(value)
