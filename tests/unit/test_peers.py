"""Workers behind one port tell each other their figures."""

import asyncio
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import Metrics
from gateway.peers import Peers, Worker, merged_metrics


@pytest.fixture
def folder() -> Iterator[Path]:
    """A path that is short enough for a socket."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def peers_of(folder: Path, number: int, count: int = 3) -> Peers:
    return Peers(Worker(number, count, folder), {"name": lambda asked: f"{number}:{asked['x']}".encode()})


async def test_whoever_is_asked_answers_for_all(folder: Path) -> None:
    async with peers_of(folder, 1) as one, peers_of(folder, 2) as two, peers_of(folder, 3) as three:
        for asked in (one, two, three):
            assert await asked.ask_all("name", x="é\n") == {number: f"{number}:é\n".encode() for number in (1, 2, 3)}


async def test_a_worker_that_is_away_or_silent_is_left_out(folder: Path) -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(5)
        writer.close()

    server = await asyncio.start_unix_server(say_nothing, str(folder / "3.sock"))
    async with peers_of(folder, 1) as one:
        assert await one.ask_all("name", x=1) == {1: b"1:1"}
    server.close()


async def test_a_worker_takes_the_place_of_one_that_was_killed(folder: Path) -> None:
    await peers_of(folder, 2).__aenter__()
    async with peers_of(folder, 1) as one, peers_of(folder, 2):
        assert await one.ask_all("name", x=1) == {1: b"1:1", 2: b"2:1"}


async def test_without_a_worker_there_are_no_others() -> None:
    async with Peers(None, {"name": lambda asked: b"alone"}) as alone:
        assert await alone.ask_all("name") == {1: b"alone"}


async def test_a_question_that_makes_no_sense_ends_without_an_answer(folder: Path) -> None:
    async with peers_of(folder, 1):
        for question in (b"\xff\n", b"{}\n", b'{"question": "other"}\n', b"x" * 100_000, b"[1]\n"):
            reader, writer = await asyncio.open_unix_connection(str(folder / "1.sock"))
            writer.write(question)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()


def test_metrics_of_several_workers_are_one_page_that_prometheus_reads() -> None:
    pages = {}
    for number in (1, 2):
        metrics = Metrics()
        metrics.gauge("headstart_test_gauge", "A gauge", partial(float, 10 * number))
        for _ in range(number):
            metrics.observe_call(200, True, None)
        pages[number] = metrics.render()
    text = merged_metrics(pages).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert [(s.labels, s.value) for s in families["headstart_test_gauge"].samples] == [
        ({"worker": "1"}, 10.0),
        ({"worker": "2"}, 20.0),
    ]
    counted = [s for s in families["headstart_chat_requests"].samples if s.name.endswith("_total")]
    assert [(s.labels["worker"], s.labels["status"], s.value) for s in counted] == [
        ("1", "200", 1.0),
        ("2", "200", 2.0),
    ]
    assert text.count("# TYPE headstart_test_gauge ") == 1
    assert len(families["headstart_ttft_seconds"].samples) % 2 == 0
