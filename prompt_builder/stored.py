"""Turns, folds and conversations as bytes. Token ids are not stored: they belong to one tokenizer."""

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import orjson

from prompt_builder.types import Message, PromptChunk, TurnContext
from retrieval.types import RenderedChunk

TURN_VERSION = 2
FOLD_VERSION = 1
MESSAGES_VERSION = 1
MOST_DECODED_BYTES = 8 * 2**20


class CorruptValue(Exception):
    """Bytes that are not what this version writes."""


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """What was sent before a question. `stripped` leading messages of the past had no chunks in that prompt."""

    context: TurnContext
    stripped: int
    written_at_s: float

    def renewed(self, now_s: float) -> "StoredTurn":
        return replace(self, written_at_s=now_s)


@dataclass(frozen=True, slots=True)
class StoredFold:
    """The summary of the first `folded` messages, and the files whose text it may hold."""

    summary: str
    folded: int
    file_ids: tuple[str, ...]
    written_at_s: float

    def renewed(self, now_s: float) -> "StoredFold":
        return replace(self, written_at_s=now_s)


def encode_turn(turn: StoredTurn) -> bytes:
    context = turn.context
    chunks = [
        [
            chunk.label,
            chunk.file_id,
            chunk.filename,
            chunk.title,
            chunk.relevance,
            chunk.body,
            chunk.rendered.text,
            chunk.form,
        ]
        for chunk in context.chunks
    ]
    said = (chunks, context.references, context.evidence, context.facts)
    return orjson.dumps([TURN_VERSION, turn.written_at_s, *said, turn.stripped])


def decode_turn(raw: bytes) -> StoredTurn:
    """Raises CorruptValue."""
    try:
        version, written_at_s, chunks, references, evidence, facts, stripped = orjson.loads(raw)
        _check(version == TURN_VERSION, _is_count(stripped), *map(_is_text, (evidence, facts, *references)))
        context = TurnContext(tuple(map(_chunk, chunks)), tuple(references), evidence, facts)
        return StoredTurn(context, stripped, float(written_at_s))
    except (ValueError, TypeError) as error:
        raise CorruptValue(str(error)) from error


class DecodedTurns:
    """Turns that were decoded lately: a conversation states its past ones at every turn. For one thread.

    Bounded by `most_bytes` of what they were decoded from, of which about as much is held in texts; the least
    recently used leave.
    """

    def __init__(self, most_bytes: int = MOST_DECODED_BYTES) -> None:
        self._most_bytes = most_bytes
        self._turns: OrderedDict[bytes, StoredTurn] = OrderedDict()
        self._bytes = 0

    @property
    def bytes_held(self) -> int:
        return self._bytes

    def get(self, raw: bytes) -> StoredTurn:
        """As `decode_turn`; equal bytes give the same turn as long as it is held."""
        turn = self._turns.get(raw)
        if turn is not None:
            self._turns.move_to_end(raw)
            return turn
        turn = self._turns[raw] = decode_turn(raw)
        self._bytes += len(raw)
        while self._bytes > self._most_bytes:
            self._bytes -= len(self._turns.popitem(last=False)[0])
        return turn


def encode_fold(fold: StoredFold) -> bytes:
    return orjson.dumps([FOLD_VERSION, fold.written_at_s, fold.folded, fold.summary, fold.file_ids])


def decode_fold(raw: bytes) -> StoredFold:
    """Raises CorruptValue."""
    try:
        version, written_at_s, folded, summary, file_ids = orjson.loads(raw)
        _check(version == FOLD_VERSION, _is_count(folded), _is_text(summary), bool(summary))
        _check(isinstance(file_ids, list), *map(_is_text, file_ids))
        return StoredFold(summary, folded, tuple(file_ids), float(written_at_s))
    except (ValueError, TypeError) as error:
        raise CorruptValue(str(error)) from error


def encode_messages(messages: list[Message]) -> bytes:
    return orjson.dumps([MESSAGES_VERSION, [[message.role, message.content] for message in messages]])


def decode_messages(raw: bytes) -> list[Message]:
    """Raises CorruptValue."""
    try:
        version, messages = orjson.loads(raw)
        _check(version == MESSAGES_VERSION, *(_is_text(role) and _is_text(content) for role, content in messages))
        return [Message(role, content) for role, content in messages]
    except (ValueError, TypeError) as error:
        raise CorruptValue(str(error)) from error


def _chunk(fields: list[Any]) -> PromptChunk:
    label, file_id, filename, title, relevance, body, text, form = fields
    # All at once: a long conversation has hundreds of chunks.
    texts = {type(field) for field in (label, file_id, filename, title, body, text)}
    _check(texts == {str}, form in ("whole", "extract"))
    rendered = RenderedChunk(label, text, ())
    return PromptChunk(label, file_id, filename, title, float(relevance), body, rendered, form)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _check(*conditions: bool) -> None:
    if not all(conditions):
        raise ValueError("a field has the wrong type or version")
