"""Several gateways in front of the same engines, with a real Redis between them."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from bench.gateway_thread import RunningGateway
from bench.shared_fleet import SECRET, TURNS, fleet, share, talks, text
from prompt_builder.layout import SUMMARY_MARK

ROOT = Path(__file__).parents[2]
APPLIED, FOREIGN = "headstart_sharing_events_applied", "headstart_sharing_foreign_runs"
DEGRADED = "headstart_sharing_degraded"
EVENTS = 2
"""Of an answer that is not streamed: begun and ended."""


async def test_two_gateways_foresee_what_engines_hold_as_well_as_one(
    model_dir: Path, redis_url: str, tmp_path: Path
) -> None:
    async with fleet(tmp_path / "one", model_dir) as alone:
        await alone.add()
        await talks(alone.gateways)
        by_one = await share(alone.gateways)
    async with fleet(tmp_path / "two", model_dir, redis_url=redis_url) as together:
        for _ in range(2):
            await together.add()
        await talks(together.gateways)
        by_two = await share(together.gateways)
    async with fleet(tmp_path / "apart", model_dir) as apart:
        for _ in range(2):
            await apart.add()
        await talks(apart.gateways)
        by_strangers = await share(apart.gateways)
    print(f"predicted and reported: one {by_one}, two {by_two}, two that share nothing {by_strangers}")
    assert by_one.reported > 0.2
    assert by_two.points <= by_one.points + 2.0
    assert by_two.reported >= by_one.reported - 0.1, "what is resident is found again by whichever gateway"
    assert by_strangers.points > by_two.points + 2.0, "the test can tell"


async def test_a_gateway_that_starts_late_knows_what_the_engines_hold(
    model_dir: Path, redis_url: str, tmp_path: Path
) -> None:
    async with fleet(tmp_path, model_dir, redis_url=redis_url) as fleet_:
        first = await fleet_.add()
        await talks([first], first=200, count=4)
        third = await fleet_.add()
        await third.until_metric(APPLIED, EVENTS * 4 * TURNS, timeout_s=10.0)
        await talks([third], first=200, count=4, at_once=1)
        warm = await share([third])
        assert warm.predicted > 0.5, "it asked the same again"
        assert warm.points <= 2.0
        assert await third.metric(FOREIGN) == 0


async def test_g2_every_request_is_answered_while_redis_stops_and_returns_and_gateways_hear_of_each_other_again(
    model_dir: Path, redis_server: Any, tmp_path: Path
) -> None:
    async with fleet(tmp_path, model_dir, redis_url=redis_server.url) as fleet_:
        one, two = await fleet_.add(), await fleet_.add()
        await talks((one, two), first=300, count=2)
        await two.until_metric("headstart_sharing_gateways", 1.0)
        going_on = asyncio.create_task(talks((one, two), first=310, count=8))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(redis_server.stop)
        await asyncio.gather(*(gateway.until_metric(DEGRADED, 1.0, timeout_s=10.0) for gateway in (one, two)))
        await talks((one, two), first=330, count=2)
        for gateway in (one, two):
            await gateway.until_metric(FOREIGN, 0.0, timeout_s=10.0)
        await asyncio.to_thread(redis_server.start)
        await going_on
        await asyncio.gather(*(gateway.until_metric(DEGRADED, 0.0, timeout_s=15.0) for gateway in (one, two)))
        before = await two.metric(APPLIED)
        await talks((one,), first=340, count=2)
        await two.until_metric(APPLIED, before + EVENTS * 2 * TURNS, timeout_s=5.0)
        assert await two.metric("headstart_sharing_degraded_seconds") > 0
        assert await one.metric("headstart_sharing_events_malformed") == 0


async def test_a_killed_gateway_leaves_no_load_behind(model_dir: Path, redis_url: str, tmp_path: Path) -> None:
    async with fleet(tmp_path, model_dir, redis_url=redis_url) as fleet_:
        other = await fleet_.add()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADSTART_")}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway.cli.main", "serve", "--port", "0"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            env={
                **environment,
                "PYTHONPATH": str(ROOT),
                "HEADSTART_ENGINE_URL": fleet_.engine_urls,
                "HEADSTART_REDIS_URL": redis_url,
                "HEADSTART_SALT_SECRET": SECRET,
                "HEADSTART_TOKENIZER": str(model_dir),
                "HEADSTART_DATA_DIR": str(tmp_path / "killed"),
                "HEADSTART_CALIBRATE": "false",
            },
        )
        assert process.stdout is not None
        try:
            killed = RunningGateway((await process.stdout.readline()).split()[-1].decode())
            asked = [asyncio.create_task(killed.ask("sim-model", text(n, 2_000), max_tokens=2_000)) for n in range(3)]
            deadline = asyncio.get_running_loop().time() + 10
            while await other.metric(FOREIGN) == 0:
                assert asyncio.get_running_loop().time() < deadline
                await asyncio.sleep(0.02)
        finally:
            process.kill()
            await process.wait()
        await asyncio.gather(*asked, return_exceptions=True)
        assert await other.metric(FOREIGN) > 0
        await other.until_metric(FOREIGN, 0.0, timeout_s=8.0)
        assert await other.metric("headstart_sharing_gateways") == 0
        assert (await other.ask("sim-model", "And now?", max_tokens=4)).status == 200


async def test_a_summary_that_one_gateway_made_is_used_by_another(
    model_dir: Path, redis_url: str, tmp_path: Path
) -> None:
    given = {"fold_high_tokens": 500, "fold_low_tokens": 250, "summary": "extract"}
    async with fleet(tmp_path, model_dir, redis_url=redis_url, **given) as fleet_:
        one, two = await fleet_.add(), await fleet_.add()

        async def say(gateway: RunningGateway, question: str) -> str:
            """The system text as the engine got it."""
            reply = await gateway.ask("sim-model", question, max_tokens=16, headstart={"conversation": "boats"})
            assert reply.status == 200
            sent = [r.body["messages"] for sim in fleet_.sims for r in sim.generations]
            [mine] = [asked for asked in sent if asked[-1]["content"] == question]
            return str(mine[0]["content"])

        for number in range(40):
            if SUMMARY_MARK in await say(one, f"Boat {number} lies in berth {number * 7}. {text(number, 30)}"):
                break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError("nothing was folded")
        assert SUMMARY_MARK in await say(two, "Where does boat 1 lie?")
