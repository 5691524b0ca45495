"""What was learned of an engine's speed, kept in files from one run to the next."""

import hashlib
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from gateway.backends.facts import EngineFacts

VERSION = 1
FILES_KEPT = 32
_FORMAT = "headstart speed"
_SUFFIX = ".speed"
_MOST_BYTES = 4 * 2**20
# A GPU engine sizes its KV cache by the memory that happens to be free; another card differs by more.
_SAME_BLOCKS = 0.1

_DIFFERENCES = {
    "engine_url": "it belongs to another engine's address",
    "machine": "it was measured from another machine",
    "model": "it belongs to another model",
    "root": "it belongs to another model folder",
    "version": "it belongs to another version of the engine",
    "block_size": "it belongs to another block size",
}


class UnusableSpeed(Exception):
    """What is kept cannot be used; the message says why, and holds no address."""


@dataclass(frozen=True, slots=True)
class SpeedKey:
    """What a measured speed belongs to. None: the engine does not tell."""

    engine_url: str
    machine: str
    model: str
    root: str | None
    version: str | None
    block_size: int | None
    num_blocks: int | None

    def difference(self, other: "SpeedKey") -> str | None:
        """Why what is kept for `other` is not this engine's; None when it is."""
        for name, words in _DIFFERENCES.items():
            if getattr(self, name) != getattr(other, name):
                return words
        now, then = self.num_blocks, other.num_blocks
        if now is None or then is None or abs(now - then) <= _SAME_BLOCKS * max(now, then):
            return None
        return f"the engine had {then:,} KV blocks then and has {now:,} now"

    def filled_from(self, other: "SpeedKey") -> "SpeedKey":
        """This key with what it does not know taken from `other`: a busy engine tells less than it could."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return SpeedKey(**{**asdict(other), **known})

    def file_name(self) -> str:
        """The number of blocks is compared, but is no part of the name: it varies a little from start to start."""
        named = orjson.dumps([getattr(self, name) for name in _DIFFERENCES])
        return hashlib.sha256(named).hexdigest()[:24] + _SUFFIX


def key_of(facts: EngineFacts, engine_url: str, machine: str) -> SpeedKey | None:
    """None where it is not known which model is served."""
    if facts.model is None:
        return None
    return SpeedKey(engine_url, machine, facts.model, facts.root, facts.version, facts.block_size, facts.num_blocks)


class SpeedFiles:
    """One file an engine below `folder`, the `FILES_KEPT` last written of them. Both methods block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, key: SpeedKey) -> bytes | None:
        """What was written under the key; None where this engine was never measured.

        Raises UnusableSpeed for a file that is not whole, not of this program, or not this engine's, and where this
        address was measured with another model, engine or machine.
        """
        path = self._folder / key.file_name()
        try:
            if not path.exists():
                self._refuse_relative(key)
                return None
        except OSError as error:
            # A folder that may not be entered, a link to itself.
            raise UnusableSpeed(f"it cannot be read ({error.strerror})") from error
        written_for, payload = _read(path)
        if (difference := key.difference(written_for)) is not None:
            raise UnusableSpeed(difference)
        return payload

    def write(self, key: SpeedKey, payload: bytes) -> None:
        """Whole or not at all, also when the machine stops in the middle. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / key.file_name()
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(_packed(key, payload))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        for old in self._newest_first()[FILES_KEPT:]:
            old.unlink(missing_ok=True)

    def _refuse_relative(self, key: SpeedKey) -> None:
        """Raises UnusableSpeed with what changed since this address was measured last."""
        for path in self._newest_first():
            with suppress(UnusableSpeed):
                written_for, _ = _read(path)
                difference = key.difference(written_for)
                if written_for.engine_url == key.engine_url and difference is not None:
                    break
        else:
            return
        raise UnusableSpeed(difference)

    def _newest_first(self) -> list[Path]:
        ages: list[tuple[float, Path]] = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError):
                ages.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(ages, reverse=True)]


def _packed(key: SpeedKey, payload: bytes) -> bytes:
    named = asdict(key)
    header = {"format": _FORMAT, "version": VERSION, "key": named, "sha256": _digest(named, payload)}
    return orjson.dumps(header) + b"\n" + payload


def _read(path: Path) -> tuple[SpeedKey, bytes]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UnusableSpeed("it is larger than any that this program writes")
        head, _, payload = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise UnusableSpeed(f"it cannot be read ({error.strerror})") from error
    try:
        header: Any = orjson.loads(head)
    except orjson.JSONDecodeError:
        raise UnusableSpeed("it is truncated or no file of this program") from None
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise UnusableSpeed("it is no file of this program")
    if header.get("version") != VERSION:
        raise UnusableSpeed(f"it has format {header.get('version')!r:.20}, this program reads {VERSION}")
    if header.get("sha256") != _digest(header.get("key"), payload):
        raise UnusableSpeed("it is truncated or was changed")
    try:
        return SpeedKey(**header["key"]), payload
    except (KeyError, TypeError):
        raise UnusableSpeed("it does not say what it belongs to") from None


def _digest(key: object, payload: bytes) -> str:
    return hashlib.sha256(orjson.dumps(key) + payload).hexdigest()
