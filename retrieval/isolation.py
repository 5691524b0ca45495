"""Parsing in a process of its own: what a hostile file can cost is bounded in memory and in time."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson

from retrieval.sections import Parsed, ParseLimits, Section
from retrieval.types import UnusableFile

# Starting a process takes about 0.3 s; plain text up to this size is read in less.
INLINE_BYTES = 128 * 1024
START_S = 30.0
_NICE = 10
_PROGRAM = "from retrieval.isolation import serve_one; serve_one()"


def is_harmless(data: bytes) -> bool:
    """Small and no container format: parsed in milliseconds by code that cannot hang."""
    return len(data) <= INLINE_BYTES and b"%PDF-" not in data[:1024] and not data.startswith(b"PK")


async def parse_isolated(data: bytes, filename: str, limits: ParseLimits, start_s: float = START_S) -> Parsed:
    """As `parsing.parse`, in a process that is killed when it exceeds its time, or when the caller is cancelled.

    `start_s` is what the process gets on top to start, in seconds.
    """
    question = orjson.dumps({"filename": filename, "limits": limits}) + b"\n" + data
    process = await asyncio.to_thread(_start)
    try:
        # A process that nobody talks to, because the caller was cancelled on the way here, ends at its input's end.
        answer, _ = await asyncio.to_thread(process.communicate, question, limits.max_seconds + start_s)
    except subprocess.TimeoutExpired:
        raise UnusableFile(
            "invalid_file",
            f"Reading the file took more than {limits.max_seconds:.0f} seconds. "
            f"Split it, or save it anew, and upload it again.",
        ) from None
    finally:
        if process.poll() is None:
            process.kill()
            await asyncio.to_thread(process.wait)
    if process.returncode != 0:
        raise UnusableFile(
            "invalid_file",
            "The file could not be read within the memory that one file may take. Split it, or save it anew.",
        )
    return _parsed(orjson.loads(answer))


def _start() -> "subprocess.Popen[bytes]":
    """Not by the event loop: uvloop forks, and copying the page tables of this process stops all that it serves."""
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[1],
    )


def serve_one() -> None:
    """The process's side: one question on standard input, one answer on standard output."""
    # Imported here: the asking side needs none of the parsers.
    from retrieval.parsing import parse

    asked = orjson.loads(sys.stdin.buffer.readline())
    limits = ParseLimits(**asked["limits"])
    _step_back(limits.max_memory_bytes)
    answer: dict[str, object]
    try:
        parsed = parse(sys.stdin.buffer.read(), asked["filename"], limits)
        answer = {"media_type": parsed.media_type, "sections": parsed.sections}
    except UnusableFile as unusable:
        answer = {"code": unusable.code, "message": str(unusable)}
    sys.stdout.buffer.write(orjson.dumps(answer))


def _step_back(most_bytes: int) -> None:
    if sys.platform == "linux":
        # Not available on Windows, without effect on macOS.
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
        os.nice(_NICE)


def _parsed(answer: dict[str, Any]) -> Parsed:
    if "code" in answer:
        raise UnusableFile(answer["code"], answer["message"])
    sections = (Section(tuple(s["heading_path"]), s["text"], s["rows"]) for s in answer["sections"])
    return Parsed(tuple(sections), answer["media_type"])
