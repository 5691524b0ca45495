"""An engine's publisher of KV events, on real sockets: sequence numbers, a replay window, restarts."""

import asyncio
from collections import deque
from types import TracebackType
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from cache.blocks import block_hashes

END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """`port` 0 takes free ones; a restart gives the old ports."""

    def __init__(self, *, window: int = 1000, rank: int = 0, topic: bytes = b"kv", replays: bool = True) -> None:
        self.rank = rank
        self.number = 0
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=window)
        self.port = self.replay_port = 0
        self.drops: set[int] = set()
        """Numbers that the next replay leaves out, as ZMQ does where the reader is slow."""
        self._topic = topic
        self._replays = replays
        self._context = zmq.asyncio.Context()
        self._task: asyncio.Task[None] | None = None

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def config(self) -> dict[str, Any]:
        """As `/kv_event_sources` tells it."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}" if self._replays else None,
            "topic": self._topic.decode(),
        }

    async def __aenter__(self) -> "Publisher":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        self._context.destroy(linger=0)

    async def start(self) -> None:
        self._pub = self._context.socket(zmq.XPUB)
        self._router = self._context.socket(zmq.ROUTER)
        for socket in (self._pub, self._router):
            socket.setsockopt(zmq.LINGER, 0)
        self.port = await _bound(self._pub, self.port)
        self.replay_port = await _bound(self._router, self.replay_port)
        self._task = asyncio.create_task(self._answer())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._pub.close()
        self._router.close()

    async def restart(self) -> None:
        """Another process on the same ports: it counts from 0 and keeps nothing."""
        await self.stop()
        self.number = 0
        self.kept.clear()
        await self.start()

    async def subscribed(self) -> None:
        """Waits until a subscriber is there: what is published before is lost to it."""
        async with asyncio.timeout(10):
            while not (await self._pub.recv()).startswith(b"\x01"):
                continue

    async def publish(self, *events: Any, lost: bool = False) -> None:
        await self.publish_raw(msgspec.msgpack.encode([1.0, list(events), self.rank]), lost=lost)

    async def publish_raw(self, payload: bytes, *, lost: bool = False) -> None:
        number, self.number = self.number, self.number + 1
        self.kept.append((number, payload))
        if not lost:
            await self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), payload])

    async def _answer(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            if not self._replays:
                continue
            for number, payload in list(self.kept):
                if number >= int.from_bytes(start, "big") and number not in self.drops:
                    await self._router.send_multipart([client, b"", self._topic, number.to_bytes(8, "big"), payload])
            self.drops.clear()
            await self._router.send_multipart([client, b"", b"", END, b""])


async def _bound(socket: zmq.asyncio.Socket, port: int) -> int:
    """A port that was closed just now is free again in a moment."""
    if not port:
        return int(socket.bind_to_random_port("tcp://127.0.0.1"))
    async with asyncio.timeout(10):
        while True:
            try:
                socket.bind(f"tcp://127.0.0.1:{port}")
            except zmq.ZMQError:
                await asyncio.sleep(0.02)
            else:
                return port


def stored(
    ids: list[int],
    block_size: int,
    *,
    first: int = 0,
    salt: str = "",
    short_hashes: bool = True,
    arrays: bool = False,
) -> Any:
    """The event of a prompt whose blocks from `first` on are new; an engine's hashes are made from ours."""
    hashes = [engine_hash(key, short_hashes) for key in block_hashes(ids, block_size, salt)]
    whole = len(hashes) * block_size
    extra = [[salt] if salt and not at else None for at in range(first, len(hashes))]
    fields: dict[str, Any] = {
        "block_hashes": hashes[first:],
        "parent_block_hash": hashes[first - 1] if first else None,
        "token_ids": ids[first * block_size : whole],
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": extra,
        "group_idx": 0,
    }
    return ["BlockStored", *fields.values()] if arrays else {"type": "BlockStored", **fields}


def removed(*keys: bytes, short_hashes: bool = True, arrays: bool = False) -> Any:
    hashes = [engine_hash(key, short_hashes) for key in keys]
    if arrays:
        return ["BlockRemoved", hashes, "GPU"]
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}


def cleared(*, arrays: bool = False) -> Any:
    return ["AllBlocksCleared"] if arrays else {"type": "AllBlocksCleared"}


def engine_hash(key: bytes, short: bool) -> int | bytes:
    return int.from_bytes(key[:8], "big") if short else key + key
