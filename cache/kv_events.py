"""What an engine tells of its KV cache, from the wire's forms to typed events.

vLLM publishes msgpack batches `[timestamp, events, data_parallel_rank]`. An event is a map tagged `type` or, from
older engines, an array whose first item is the tag and whose others follow in the order of the map's fields.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from cache.blocks import pack_ids

EngineHash = int | bytes
"""How an engine names a block: the last 64 bits of its hash, or the whole of it."""

MOST_RANKS = 1024
_MOST_HASHES = 1 << 20
_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
_DECODER = msgspec.msgpack.Decoder()


class MalformedEvents(ValueError):
    """Bytes that are no batch of events. The message never repeats them: they hold prompts."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks of a prompt or an answer, one behind the other; `parent` is None where a prompt begins.

    `packed` are the ids of their tokens, 4 bytes each. `salt` is None where the event does not say what else than
    tokens its hashes cover.
    """

    hashes: tuple[EngineHash, ...]
    parent: EngineHash | None
    packed: bytes
    block_size: int
    salt: str | None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    hashes: tuple[EngineHash, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The engine's cache was reset."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """`malformed` counts the events that could not be read; those of other memories than the GPU's are left out."""

    events: tuple[KvEvent, ...]
    rank: int
    malformed: int


def read_batch(payload: bytes) -> EventBatch:
    """Raises MalformedEvents for what is no batch at all."""
    try:
        batch = _DECODER.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedEvents(type(error).__name__) from None
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise MalformedEvents("not an array of time and events")
    rank = batch[2] if len(batch) > 2 and batch[2] is not None else 0
    if type(rank) is not int or not 0 <= rank < MOST_RANKS:
        raise MalformedEvents("not a rank")
    events, malformed = [], 0
    for item in batch[1]:
        try:
            event = _read_event(item)
        except MalformedEvents:
            malformed += 1
            continue
        if event is not None:
            events.append(event)
    return EventBatch(tuple(events), rank, malformed)


def _read_event(item: Any) -> KvEvent | None:
    """None for an event that tells nothing of the blocks that prompts hit. Raises MalformedEvents."""
    tag = item.get("type") if isinstance(item, dict) else item[0] if isinstance(item, list) and item else None
    if tag == "AllBlocksCleared":
        return AllBlocksCleared()
    if tag == "BlockRemoved":
        fields = _fields(item, _REMOVED_FIELDS)
        return BlockRemoved(_hashes(fields)) if _is_cache_of_prompts(fields) else None
    if tag == "BlockStored":
        fields = _fields(item, _STORED_FIELDS)
        return _stored(fields) if _is_cache_of_prompts(fields) else None
    if isinstance(tag, str):
        # A kind that this reader does not know yet.
        return None
    raise MalformedEvents("an event without a kind")


def _fields(item: dict[str, Any] | list[Any], names: Sequence[str]) -> Mapping[str, Any]:
    return item if isinstance(item, dict) else dict(zip(names, item[1:], strict=False))


def _is_cache_of_prompts(fields: Mapping[str, Any]) -> bool:
    """The GPU's blocks, of the first group where a hybrid model has several."""
    return fields.get("medium") in (None, "GPU") and fields.get("group_idx") in (None, 0)


def _hashes(fields: Mapping[str, Any]) -> tuple[EngineHash, ...]:
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list) or len(hashes) > _MOST_HASHES or not all(map(_is_hash, hashes)):
        raise MalformedEvents("not a list of hashes")
    return tuple(hashes)


def _is_hash(value: object) -> bool:
    return type(value) is int or (type(value) is bytes and 0 < len(value) <= 64)


def _stored(fields: Mapping[str, Any]) -> BlockStored:
    hashes, parent, ids, size = (
        _hashes(fields),
        fields.get("parent_block_hash"),
        fields.get("token_ids"),
        fields.get("block_size"),
    )
    if parent is not None and not _is_hash(parent):
        raise MalformedEvents("not a parent's hash")
    if type(size) is not int or size <= 0 or not isinstance(ids, list) or len(ids) != size * len(hashes):
        raise MalformedEvents("not a whole number of blocks")
    try:
        packed = pack_ids(ids)
    except Exception as error:  # struct.error for what is no id
        raise MalformedEvents(type(error).__name__) from None
    return BlockStored(hashes, parent, packed, size, _salt(fields, parent is None))


def _salt(fields: Mapping[str, Any], first: bool) -> str | None:
    """The salt alone may stand beside the first block's tokens; an adapter, an image, embeddings make it unknown."""
    if fields.get("lora_id") is not None or fields.get("lora_name") is not None:
        return None
    extra = fields.get("extra_keys")
    if not isinstance(extra, list):
        return None
    keys = [key for block in extra if isinstance(block, list) for key in block]
    if not keys:
        return ""
    if first and len(keys) == 1 and isinstance(keys[0], str) and isinstance(extra[0], list) and len(extra[0]) == 1:
        return keys[0]
    return None
