"""Turn contexts and conversations as bytes. Token ids are not stored: they belong to one tokenizer."""

from typing import Any

import orjson

from prompt_builder.types import Message, PromptChunk, TurnContext
from retrieval.types import RenderedChunk

VERSION = 1


class CorruptValue(Exception):
    """Bytes that are not what this version writes."""


def encode_context(context: TurnContext, written_at_s: float) -> bytes:
    chunks = [
        [chunk.label, chunk.file_id, chunk.filename, chunk.title, chunk.relevance, chunk.body, chunk.rendered.text]
        for chunk in context.chunks
    ]
    return orjson.dumps([VERSION, written_at_s, chunks, context.references, context.evidence, context.facts])


def decode_context(raw: bytes) -> tuple[TurnContext, float]:
    """The context and when it was written, in seconds; raises CorruptValue."""
    try:
        version, written_at_s, chunks, references, evidence, facts = orjson.loads(raw)
        _check(version == VERSION, *map(_is_text, (evidence, facts, *references)))
        context = TurnContext(tuple(map(_chunk, chunks)), tuple(references), evidence, facts)
        return context, float(written_at_s)
    except (ValueError, TypeError) as error:
        raise CorruptValue(str(error)) from error


def encode_messages(messages: list[Message]) -> bytes:
    return orjson.dumps([VERSION, [[message.role, message.content] for message in messages]])


def decode_messages(raw: bytes) -> list[Message]:
    """Raises CorruptValue."""
    try:
        version, messages = orjson.loads(raw)
        _check(version == VERSION, *(_is_text(role) and _is_text(content) for role, content in messages))
        return [Message(role, content) for role, content in messages]
    except (ValueError, TypeError) as error:
        raise CorruptValue(str(error)) from error


def _chunk(fields: list[Any]) -> PromptChunk:
    label, file_id, filename, title, relevance, body, text = fields
    _check(*map(_is_text, (label, file_id, filename, title, body, text)))
    rendered = RenderedChunk(label, text, ())
    return PromptChunk(label, file_id, filename, title, float(relevance), body, rendered)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _check(*conditions: bool) -> None:
    if not all(conditions):
        raise ValueError("a field has the wrong type or version")
