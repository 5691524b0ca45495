"""What is known of an engine at start, and how its coming is noticed."""

import asyncio
import time
from pathlib import Path

import pytest

from bench.engine_sim import EngineSim
from bench.sim.config import Fault, SimConfig
from gateway.backends.vllm import EngineLimits, EngineSession
from gateway.endpoints import parse_endpoints
from gateway.errors import ApiError
from gateway.replicas import Replicas
from gateway.runs import Work
from gateway.serving import Serving
from gateway.settings import Settings

LIMITS = EngineLimits(connect_s=2.0, first_token_s=10.0, between_tokens_s=5.0, answer_s=10.0)


def settings(url: str, tmp_path: Path) -> Settings:
    return Settings(engine_url=url, data_dir=tmp_path, cache_dir=tmp_path, probe_interval_s=0.05)


async def test_an_engine_that_answers_is_known_when_the_start_is_over(tmp_path: Path) -> None:
    async with (
        EngineSim(SimConfig()) as sim,
        EngineSession(LIMITS) as session,
        Replicas(settings(sim.url, tmp_path), session, LIMITS) as replicas,
    ):
        assert replicas.model == "sim-model"
        assert replicas.serving.facts.conclusive


async def test_an_engine_that_takes_questions_and_is_silent_does_not_hold_up_the_start(tmp_path: Path) -> None:
    async with EngineSim(SimConfig()) as sim, EngineSession(LIMITS) as session:
        sim.set_fault(Fault("hang", after_chunks=None, path="/v1/chat"))
        began = time.monotonic()
        async with Replicas(settings(sim.url, tmp_path), session, LIMITS, first_probe_s=0.2) as replicas:
            assert time.monotonic() - began < 2.0
            assert not replicas.serving.facts.reachable


async def test_a_follower_that_fails_does_not_end_the_probing(tmp_path: Path) -> None:
    async with EngineSim(SimConfig()) as sim, EngineSession(LIMITS) as session:
        await sim.stop()
        came, went = asyncio.Event(), asyncio.Event()
        async with Replicas(settings(sim.url, tmp_path), session, LIMITS) as replicas:

            def follow(serving: Serving) -> None:
                (came if serving.facts.reachable else went).set()
                raise RuntimeError("a follower fails")

            replicas.on_change(follow)
            async with asyncio.timeout(10):
                await sim.start()
                await came.wait()
                await sim.stop()
                await went.wait()


async def test_an_engine_that_is_gone_for_long_is_still_known_for_what_it_served(tmp_path: Path) -> None:
    async with (
        EngineSim(SimConfig()) as sim,
        EngineSession(LIMITS) as session,
        Replicas(settings(sim.url, tmp_path), session, LIMITS) as replicas,
    ):
        await sim.stop()
        for _ in range(3):
            await replicas.all[0].probe()
        assert not replicas.serving.facts.reachable
        assert replicas.model == "sim-model"
        assert replicas.serving.facts.max_model_len == SimConfig().max_model_len


async def test_a_full_queue_before_an_unknown_engine_does_not_invite_to_come_again_at_once(tmp_path: Path) -> None:
    async with EngineSession(LIMITS) as session:
        replicas = Replicas(
            settings("http://127.0.0.1:9", tmp_path).model_copy(update={"max_queued": 1}), session, LIMITS
        )
        work = Work(5000, None, (), None, None)
        _, released = await replicas.enter(work, "salt")
        waiting = asyncio.create_task(replicas.enter(work, "salt"))
        await asyncio.sleep(0.01)
        with pytest.raises(ApiError) as refusal:
            await replicas.enter(work, "salt")
        waiting.cancel()
        await asyncio.wait([waiting])
        released.close()
    assert refusal.value.headers()["retry-after"] == "1"
    assert replicas.all[0].pacer.idle


async def test_an_engine_whose_probes_were_cut_off_for_a_while_is_asked_again_later(tmp_path: Path) -> None:
    async with EngineSim(SimConfig()) as sim, EngineSession(LIMITS) as session:
        sim.set_fault(Fault("cut", after_chunks=None, path="/v1/chat", count=8))
        known = asyncio.Event()
        async with Replicas(settings(sim.url, tmp_path), session, LIMITS) as replicas:
            replicas.on_change(lambda serving: known.set() if serving.facts.conclusive else None)
            async with asyncio.timeout(20):
                await known.wait()
            assert replicas.serving.facts.token_ids_accepted


async def test_an_engine_that_is_taken_off_the_list_finishes_what_it_has_and_gets_nothing_new(tmp_path: Path) -> None:
    async with EngineSim(SimConfig()) as one, EngineSim(SimConfig()) as two, EngineSession(LIMITS) as session:
        both = parse_endpoints(f"one={one.url},two={two.url}")
        async with Replicas(settings(one.url, tmp_path), session, LIMITS, endpoints=both) as replicas:
            work = Work(10, None, (), None, None)
            replica, run = await replicas.enter(work, "salt")
            rest = [endpoint for endpoint in both if endpoint.name != replica.name]
            await replicas.apply(rest)
            assert replica.draining
            assert replica in replicas.all
            for _ in range(5):
                other, next_run = await replicas.enter(work, "salt")
                assert other is not replica
                next_run.first_token()
                next_run.close()
            run.close()
            async with asyncio.timeout(5):
                while replica in replicas.all:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert [each.name for each in replicas.all] == [endpoint.name for endpoint in rest]


async def test_an_engine_that_is_put_on_the_list_is_greeted_probed_and_used(tmp_path: Path) -> None:
    async with EngineSim(SimConfig()) as one, EngineSim(SimConfig()) as two, EngineSession(LIMITS) as session:
        first, both = parse_endpoints(one.url), parse_endpoints(f"engine={one.url},new={two.url}")
        async with Replicas(settings(one.url, tmp_path), session, LIMITS, endpoints=first) as replicas:
            greeted: list[str] = []
            replicas.on_arrival(lambda replica: greeted.append(replica.name))
            await replicas.apply(both)
            assert greeted == ["engine", "new"]
            new = replicas.get("new")
            assert new is not None
            async with asyncio.timeout(5):
                while not new.usable:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert {outlook.name for outlook in replicas.outlooks("salt")} == {"engine", "new"}


async def test_a_name_that_moves_to_another_address_is_another_replica(tmp_path: Path) -> None:
    async with EngineSim(SimConfig()) as one, EngineSim(SimConfig()) as two, EngineSession(LIMITS) as session:
        before = parse_endpoints(f"main={one.url}")
        async with Replicas(settings(one.url, tmp_path), session, LIMITS, endpoints=before) as replicas:
            old = replicas.get("main")
            await replicas.apply(parse_endpoints(f"main={two.url}"))
            new = replicas.get("main")
            assert new is not None
            assert new is not old
            assert new.endpoint.url == two.url


async def test_an_empty_list_of_engines_changes_nothing(tmp_path: Path) -> None:
    async with (
        EngineSim(SimConfig()) as sim,
        EngineSession(LIMITS) as session,
        Replicas(settings(sim.url, tmp_path), session, LIMITS) as replicas,
    ):
        await replicas.apply(())
        assert [replica.name for replica in replicas.all] == ["engine"]
        assert not replicas.all[0].draining


async def test_of_two_equally_good_replicas_the_one_used_last_is_used_again(tmp_path: Path) -> None:
    async with EngineSim(SimConfig()) as one, EngineSim(SimConfig()) as two, EngineSession(LIMITS) as session:
        both = parse_endpoints(f"one={one.url},two={two.url}")
        async with Replicas(settings(one.url, tmp_path), session, LIMITS, endpoints=both) as replicas:
            used = set()
            for _ in range(6):
                replica, run = await replicas.enter(Work(10, None, (), None, None), "salt")
                used.add(replica.name)
                run.first_token()
                run.close()
            assert len(used) == 1
