"""A process of its own bounds what a hostile file can take."""

import asyncio
import time

import pytest
from fpdf import FPDF

from retrieval.isolation import is_harmless, parse_isolated
from retrieval.parsing import parse
from retrieval.sections import ParseLimits
from retrieval.types import UnusableFile


def pdf(pages: int) -> bytes:
    document = FPDF()
    for number in range(pages):
        document.add_page()
        document.set_font("helvetica", size=12)
        document.multi_cell(0, 8, f"Text of page {number}.")
    return bytes(document.output())


async def test_a_file_gives_the_same_sections_as_in_this_process() -> None:
    for data, name in ((pdf(2), "a.pdf"), ("# Tiêu đề\n\nbệnh\u2028한국".encode(), "a.md"), (b"a,b\n1,2\n", "a.csv")):
        assert await parse_isolated(data, name, ParseLimits()) == parse(data, name)


async def test_e10_errors_of_a_broken_file_come_through() -> None:
    with pytest.raises(UnusableFile, match="3 pages; the most is 2") as refusal:
        await parse_isolated(pdf(3), "a.pdf", ParseLimits(max_pages=2))
    assert refusal.value.code == "invalid_file"


async def test_e10_a_file_that_takes_too_much_memory_is_refused_and_this_process_is_not_touched() -> None:
    data = b"<p>" + b"<b>x</b>" * 2_000_000
    with pytest.raises(UnusableFile, match=r"memory|in parts"):
        await parse_isolated(data, "a.html", ParseLimits(max_memory_bytes=400 * 2**20))


async def test_e10_a_file_that_takes_too_long_is_stopped() -> None:
    started = time.monotonic()
    with pytest.raises(UnusableFile, match="more than 1 seconds"):
        await parse_isolated(b"- a\n\n# H\n" * 1_000_000, "a.md", ParseLimits(max_seconds=1), start_s=0.5)
    assert time.monotonic() - started < 10


async def test_cancelling_stops_the_process_at_once() -> None:
    task = asyncio.create_task(parse_isolated(b"- a\n\n# H\n" * 1_000_000, "a.md", ParseLimits()))
    await asyncio.sleep(0.5)
    started = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - started < 2


def test_only_small_plain_text_is_parsed_in_this_process() -> None:
    assert is_harmless(b"text")
    assert not is_harmless(b"x" * 200_000)
    assert not is_harmless(b"\n\n%PDF-1.7")
    assert not is_harmless(b"PK\x03\x04")
