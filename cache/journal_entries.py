"""What gateways tell each other of the requests they send to one engine; how it is packed, and what is believed.

Hashes are salted and chained (`cache.blocks`), chunks are named by their labels: no text and no token travels.
Entries come from a network: their types and sizes are checked before anything is made of them.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from cache.blocks import HASH_BYTES

MOST_BLOCKS = 32_768
"""Hashes of one prompt, 512 KiB: half a million tokens in blocks of 16. A longer prompt is told without hashes."""

MOST_EVENTS = 512
_MOST_TOKENS = 2**26
MOST_SECONDS = 86_400.0

Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=_MOST_TOKENS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]
Hashes = Annotated[bytes, msgspec.Meta(max_length=MOST_BLOCKS * HASH_BYTES)]
GatewayId = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]


class Begun(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A prompt of `tokens` went to the engine. `hashes`: those of its whole blocks, one behind the other, or nothing.

    `uncached_tokens`, `cached_tokens` and `seconds` are its prefill as predicted.
    """

    run: Number
    tokens: Tokens
    hashes: Hashes
    uncached_tokens: Tokens
    cached_tokens: Tokens
    seconds: Seconds


class FirstToken(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Its prefill is over."""

    run: Number


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """It is over: answered, failed or abandoned. `cached_tokens` and `output_tokens` as the engine reported them."""

    run: Number
    cached_tokens: Tokens | None
    output_tokens: Tokens | None


Event = Begun | FirstToken | Ended


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """What one gateway tells at once of one engine.

    `epoch` is when the engine's process began, None where that is not known. `queued_s` is the predicted prefill time
    of what waits in this gateway's queue for it, and `oldest_s` how long the oldest of it has waited, None when
    nothing waits.
    """

    gateway: GatewayId
    epoch: float | None
    queued_s: Seconds
    oldest_s: Seconds | None
    events: Annotated[list[Event], msgspec.Meta(max_length=MOST_EVENTS)]


class Chosen(msgspec.Struct, frozen=True, array_like=True):
    """The chunks that one prompt held behind what `key` stands for: labels and tokens."""

    gateway: GatewayId
    key: Annotated[bytes, msgspec.Meta(max_length=64)]
    chunks: Annotated[list[tuple[Annotated[str, msgspec.Meta(max_length=128)], Tokens]], msgspec.Meta(max_length=256)]


class Malformed(ValueError):
    """An entry that no gateway of this version wrote."""


_encoder = msgspec.msgpack.Encoder()
_batches = msgspec.msgpack.Decoder(Batch)
_chosen = msgspec.msgpack.Decoder(Chosen)


def pack(entry: Batch | Chosen) -> bytes:
    return _encoder.encode(entry)


def read_batch(data: bytes) -> Batch:
    """Raises Malformed."""
    try:
        return _batches.decode(data)
    except msgspec.MsgspecError as error:
        raise Malformed(str(error)) from None


def read_chosen(data: bytes) -> Chosen:
    """Raises Malformed."""
    try:
        return _chosen.decode(data)
    except msgspec.MsgspecError as error:
        raise Malformed(str(error)) from None


def join_hashes(hashes: Sequence[bytes]) -> bytes:
    """Nothing where there are too many."""
    return b"".join(hashes) if len(hashes) <= MOST_BLOCKS else b""


def split_hashes(joined: bytes, tokens: int, block_size: int) -> list[bytes] | None:
    """The hashes of a prompt's whole blocks; None where they were not told. Raises Malformed."""
    if not joined and tokens >= block_size:
        return None
    if len(joined) != tokens // block_size * HASH_BYTES:
        raise Malformed(f"{len(joined)} bytes of hashes are not those of {tokens} tokens in blocks of {block_size}")
    return [joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES)]
