"""`headstart tune` against the whole gateway, with the simulated engine behind it."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from bench.engine_sim import EngineSim, Fault, SimConfig
from bench.gateway_thread import RunningGateway, run_gateway, settings_for
from gateway.cli.main import app

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).parents[2]
REST = "".join(f"Rule {number} of this page is kept by everyone who works here. " for number in range(12))
FILES = {
    "ferry.md": f"# Ferry\n\nThe last ferry to Pellen leaves at nineteen forty on weekdays. {REST}\n",
    "kitchen.md": f"# Kitchen\n\nThe shared kitchen opens at six in the morning. {REST}\n",
    "leave.md": f"# Leave\n\nShore staff receive 27 working days of paid leave in each year. {REST}\n",
    "fares.md": f"# Fares\n\nA bicycle costs four crowns, a kayak costs nine crowns. {REST}\n",
}
QUESTIONS = [
    {"question": "When does the last ferry to Pellen leave?", "document": "ferry.md", "answer": "nineteen forty"},
    {"question": "When does the shared kitchen open?", "document": "kitchen.md", "answer": "six"},
    {"question": "How many days of paid leave are there?", "document": "leave.md", "answer": "27 working days"},
    {"question": "What does a kayak cost?", "document": "fares.md", "answer": "nine crowns"},
]


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class Place:
    """A folder with the questions, and a gateway that holds their documents in the store `handbook`."""

    folder: Path
    gateway: RunningGateway
    engine: EngineSim

    async def tune(self, *arguments: str, questions: str = "questions.jsonl", store: str = "handbook") -> Ended:
        process = await self.start(*arguments, questions=questions, store=store)
        stdout, stderr = await asyncio.wait_for(process.communicate(), 120)
        return Ended(process.returncode or 0, stdout.decode(), stderr.decode())

    async def start(
        self, *arguments: str, questions: str = "questions.jsonl", store: str = "handbook", url: str | None = None
    ) -> asyncio.subprocess.Process:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADSTART_")}
        command = ("tune", questions, "--store", store, "--url", url or self.gateway.url, *arguments)
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "gateway.cli.main",
            *command,
            cwd=self.folder,
            env={**environment, "PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    def write(self, questions: Sequence[object]) -> None:
        lines = "\n".join(json.dumps(question) for question in questions)
        (self.folder / "questions.jsonl").write_text(lines + "\n")

    def told(self, stem: str = "tune-handbook") -> Any:
        return json.loads((self.folder / f"{stem}.json").read_text())

    def measured(self, stem: str = "tune-handbook") -> list[Any]:
        lines = (self.folder / f"{stem}.measured.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines[1:]]

    async def stores(self) -> list[str]:
        async with self.gateway.client() as client:
            return [store.name async for store in client.vector_stores.list()]


@asynccontextmanager
async def place_in(folder: Path, **config: Any) -> AsyncIterator[Place]:
    # Answers repeat the end of the prompt's last line, and are paced so that a test can interrupt between them.
    async with (
        EngineSim(SimConfig(**{"time_scale": 0.02, "decode_tokens_per_s": None, **config})) as engine,
        run_gateway(settings_for(folder, engine.url)) as gateway,
    ):
        await gateway.make_store("handbook", FILES)
        place = Place(folder, gateway, engine)
        place.write(QUESTIONS)
        yield place


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    async with place_in(tmp_path_factory.mktemp("tune")) as place:
        yield place


@pytest.fixture
def place(running: Place, tmp_path: Path) -> Place:
    """The shared gateway, with a folder of the test's own. Its store is not to be changed."""
    place = replace(running, folder=tmp_path)
    place.write(QUESTIONS)
    return place


async def test_settings_are_measured_compared_and_recommended(place: Place) -> None:
    ended = await place.tune("--k", "1,4", "--budgets", "0,5000")
    assert ended.code == 0, ended.stderr
    assert "Recommended: k=1" in ended.stdout
    told = place.told()
    assert [result["name"] for result in told["results"]] == ["k=1", "k=4", "k=1, 5000 ms", "k=4, 5000 ms"]
    assert all(result["questions"] == 4 and result["failed"] == 0 for result in told["results"])
    assert all(result["recall"] == 1 for result in told["results"])
    assert [result["chunks"] for result in told["results"][:2]] == [1, 4]
    assert told["results"][2]["attainment"] == 1
    assert told["results"][2]["goodput_per_s"] > 0
    assert told["set"]["HEADSTART_TOP_K"] == 1
    assert "4 of 4 questions" in ended.stdout
    html = (place.folder / "tune-handbook.html").read_text()
    assert "Tuning of handbook" in html
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="', html)


async def test_requests_differ_as_the_settings_say_and_share_no_prefix_between_them(place: Place) -> None:
    ended = await place.tune("--k", "2", "--budgets", "0", "--variants", "evidence_lines", "--max-tokens", "7")
    assert ended.code == 0, ended.stderr
    chats = [request.body for request in place.engine.generations if request.body["max_tokens"] == 7]
    assert len(chats) == 4 * 5 + 2
    assert all(body["temperature"] == 0 and body["stream"] for body in chats)
    marks = {re.findall(r"\([0-9a-f]{8}-[0-9a-f]{6}\)", json.dumps(body["messages"]))[0] for body in chats}
    assert len(marks) == 1 + 4 + 1  # the setting, it again and three variants, and what warms up
    assert len(place.told()["variants"]) == 4


async def test_it_goes_on_where_it_stopped_and_asks_nothing_twice(place: Place) -> None:
    await place.tune("--k", "1", "--budgets", "0", "--limit", "2")
    first = place.measured()
    assert len(first) == 2
    ended = await place.tune("--k", "1,2", "--budgets", "0")
    assert "Going on with 2 measurements" in ended.stdout
    assert place.measured()[:2] == first
    assert len(place.measured()) == 8
    again = await place.tune("--k", "1,2", "--budgets", "0")
    assert again.code == 0
    assert len(place.measured()) == 8
    fresh = await place.tune("--k", "1", "--budgets", "0", "--fresh")
    assert "Going on" not in fresh.stdout
    assert len(place.measured()) == 4


async def test_changed_questions_and_a_changed_store_are_noticed(tmp_path: Path) -> None:
    async with place_in(tmp_path) as place:
        await place.tune("--k", "1", "--budgets", "0")
        place.write(QUESTIONS[:3])
        ended = await place.tune("--k", "1", "--budgets", "0")
        assert (ended.code, len(place.measured())) == (2, 4)
        assert "changed since: the questions. --fresh starts over" in ended.stderr
        place.write(QUESTIONS)
        async with place.gateway.client() as client:
            store = next(iter((await client.vector_stores.list()).data))
            await client.vector_stores.files.upload_and_poll(
                vector_store_id=store.id, file=("new.md", b"# New\n\nSomething new."), poll_interval_ms=20
            )
        ended = await place.tune("--k", "1", "--budgets", "0")
        assert ended.code == 2
        assert "changed since: what the store holds" in ended.stderr


async def test_ctrl_c_keeps_what_is_done_prints_it_and_removes_the_scratch_store(tmp_path: Path) -> None:
    async with place_in(tmp_path, decode_tokens_per_s=30.0, time_scale=0.3) as place:
        process = await place.start("--k", "1,2", "--budgets", "0", "--chunk-tokens", "64")
        journal = tmp_path / "tune-handbook.measured.jsonl"
        for _ in range(3000):
            if journal.exists() and len(place.measured()) >= 5:
                break
            await asyncio.sleep(0.02)
        assert len(await place.stores()) == 2
        process.send_signal(signal.SIGINT)
        stdout, stderr = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 130, stderr
        kept = len(place.measured())
        assert f"Stopped at {kept} of 16; the same command goes on." in stdout.decode()
        assert "chunks of 64" in stdout.decode()
        assert place.told()["interrupted"] is True
        assert await place.stores() == ["handbook"]


async def test_chunk_sizes_are_tried_in_a_scratch_store_that_is_gone_afterwards(place: Place) -> None:
    ended = await place.tune("--k", "1", "--budgets", "0", "--chunk-tokens", "64,128")
    assert ended.code == 0, ended.stderr
    names = [result["name"] for result in place.told()["results"]]
    assert names == ["k=1", "k=1, chunks of 64", "k=1, chunks of 128"]
    prompts = [result["prompt_tokens"] for result in place.told()["results"]]
    assert prompts[1] < prompts[2] < prompts[0]
    assert await place.stores() == ["handbook"]


async def test_failed_requests_are_misses_and_an_engine_that_is_gone_ends_it(tmp_path: Path) -> None:
    async with place_in(tmp_path) as place:
        place.engine.set_fault(Fault("status", after_chunks=None, count=2, path="/v1/chat", status=500, body="{}"))
        ended = await place.tune("--k", "1", "--budgets", "0")
        assert ended.code == 0, ended.stderr
        assert place.told()["results"][0]["failed"] == 1  # the other one warmed up
        assert "1 requests failed" in ended.stdout
        place.engine.set_fault(Fault("status", after_chunks=None, count=None, path="/v1/chat", status=500, body="{}"))
        ended = await place.tune("--k", "1,2,3", "--budgets", "0", "--output", "other")
        assert ended.code == 1
        assert "8 requests in a row failed" in ended.stderr


CASES = [
    (("none.jsonl",), "No file '"),
    (("empty.jsonl",), "holds no question"),
    (("broken.jsonl",), "line 2: 'question' must be a text"),
    (("foreign.jsonl",), "holds none of the documents"),
    (("questions.jsonl", "--store", "handbok"), "No store 'handbok'. Known: handbook."),
    (("questions.jsonl", "--k", "0"), "--k: 0 is not"),
    (("questions.jsonl", "--k", "51"), "--k: 51 is not a whole number from 1 to 50"),
    (("questions.jsonl", "--k", ","), "--k: no number given"),
    (("questions.jsonl", "--budgets", "soon"), "--budgets: 'soon' is not a number"),
    (("questions.jsonl", "--budgets", "-1"), "--budgets: -1 is not"),
    (("questions.jsonl", "--chunk-tokens", "8"), "--chunk-tokens: 8 is not a whole number from 32"),
    (("questions.jsonl", "--variants", "order"), "--variants: no 'order'. There are chunk_order"),
    (("questions.jsonl", "--output", "no/such/folder/x"), "--output: no folder"),
    (("questions.jsonl", "--limit", "0"), "--limit: 0 is not"),
    (("questions.jsonl", "--url", "localhost"), "it starts with http:// or https://"),
]


async def test_what_cannot_be_used_is_said_in_one_line_with_status_2(place: Place) -> None:
    (place.folder / "empty.jsonl").touch()
    (place.folder / "broken.jsonl").write_text('{"question": "a?"}\n{"question": 1}\n')
    (place.folder / "foreign.jsonl").write_text('{"question": "a?", "document": "nowhere.md"}\n')
    base = ("--store", "handbook", "--url", place.gateway.url, "--output", str(place.folder / "tune"))
    for (questions, *arguments), said in CASES:
        command = ["tune", str(place.folder / questions), *base, *arguments]
        ended = await asyncio.to_thread(CliRunner().invoke, app, command)
        assert (ended.exit_code, said in ended.stderr) == (2, True), (said, ended.output)
        assert len(ended.stderr.splitlines()) == 1


async def test_without_a_gateway_it_says_how_to_start_one(place: Place, free_port: int) -> None:
    process = await place.start(url=f"http://127.0.0.1:{free_port}")
    _, stderr = await process.communicate()
    assert process.returncode == 1
    assert "No gateway answers at" in stderr.decode()


async def test_the_report_never_overwrites_the_questions(place: Place) -> None:
    questions = place.folder / "mine.measured.jsonl"
    questions.write_text('{"question": "a?"}\n')
    ended = await place.tune("--output", "mine", "--fresh", questions="mine.measured.jsonl")
    assert ended.code == 2
    assert "would overwrite the questions" in ended.stderr
    assert questions.read_text() == '{"question": "a?"}\n'
