"""Arrays in one file, written whole or not at all, and read only if they are what they claim to be."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

_MAGIC = b"headstart index 1\n"
_LONGEST_HEADER = 1 << 20


class UnusableSnapshot(Exception):
    """The file is truncated, foreign, or of another kind; the message says which. It can be made anew."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`generation` is the store's at the time; `kind` names the index that the arrays belong to."""

    store_id: str
    kind: str
    generation: int
    arrays: Mapping[str, NDArray[Any]]


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Replace `path` atomically: whoever reads it sees the old file or the new one. Raises OSError."""
    arrays = {name: np.ascontiguousarray(array) for name, array in snapshot.arrays.items()}
    header = orjson.dumps(
        {
            "store_id": snapshot.store_id,
            "kind": snapshot.kind,
            "generation": snapshot.generation,
            "arrays": [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()],
            "checksum": _checksum(snapshot.store_id, snapshot.kind, snapshot.generation, arrays),
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    waiting = path.with_suffix(".tmp")
    with waiting.open("wb") as file:
        file.write(_MAGIC + len(header).to_bytes(4, "big") + header)
        for array in arrays.values():
            file.write(_bytes(array))
        file.flush()
        os.fsync(file.fileno())
    waiting.replace(path)
    # The new name itself is durable only when the folder is.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_snapshot(path: Path, store_id: str, kind: str) -> Snapshot | None:
    """The snapshot at `path`, None where there is none. Raises UnusableSnapshot."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnusableSnapshot(f"cannot be read: {error.strerror}") from error
    if not content.startswith(_MAGIC):
        raise UnusableSnapshot("is no index of this version")
    start = len(_MAGIC) + 4
    length = int.from_bytes(content[len(_MAGIC) : start], "big")
    if length > _LONGEST_HEADER or len(content) < start + length:
        raise UnusableSnapshot("is truncated")
    try:
        header = orjson.loads(content[start : start + length])
        arrays, end = _arrays(content, start + length, header["arrays"])
        found = Snapshot(header["store_id"], header["kind"], int(header["generation"]), arrays)
        checksum = header["checksum"]
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise UnusableSnapshot("is damaged") from error
    if end != len(content):
        raise UnusableSnapshot("is truncated")
    if checksum != _checksum(found.store_id, found.kind, found.generation, arrays):
        raise UnusableSnapshot("does not match its checksum")
    if found.store_id != store_id:
        raise UnusableSnapshot(f"belongs to another store, '{found.store_id}'")
    if found.kind != kind:
        raise UnusableSnapshot(f"is of kind '{found.kind}', not '{kind}'")
    return found


def _arrays(content: bytes, offset: int, layout: list[list[Any]]) -> tuple[dict[str, NDArray[Any]], int]:
    arrays: dict[str, NDArray[Any]] = {}
    for name, dtype, shape in layout:
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(content, dtype=np.dtype(dtype), count=count, offset=offset).reshape(shape)
        arrays[name] = array
        offset += array.nbytes
    return arrays, offset


def _checksum(store_id: str, kind: str, generation: int, arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.blake2b(f"{store_id}\0{kind}\0{generation}\0".encode(), digest_size=16)
    for name, array in arrays.items():
        digest.update(name.encode())
        digest.update(_bytes(array))
    return digest.hexdigest()


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
