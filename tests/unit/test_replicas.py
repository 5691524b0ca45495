"""What is known of an engine at start, and how its coming is noticed."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.engine_sim import EngineSim
from bench.sim.config import Fault, SimConfig
from gateway.backends.vllm import EngineLimits, EngineSession
from gateway.budgets import Budget
from gateway.endpoints import parse_endpoints
from gateway.errors import ApiError
from gateway.planning import forecast_plain, refuse_if_late
from gateway.queueing import PATIENCE, ROUTED_PATIENCE
from gateway.replica import STALE_S, Replica
from gateway.replicas import Replicas
from gateway.runs import Work
from gateway.serving import Serving
from gateway.settings import Settings
from prompt_builder.outlook import Clock
from prompt_builder.types import Prompt

LIMITS = EngineLimits(connect_s=2.0, first_token_s=10.0, between_tokens_s=5.0, answer_s=10.0)


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


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
        sim.set_fault(Fault("hang", after_chunks=None, path="/v1/chat", probes=True))
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
        sim.set_fault(Fault("cut", after_chunks=None, path="/v1/chat", count=8, probes=True))
        known = asyncio.Event()
        async with Replicas(settings(sim.url, tmp_path), session, LIMITS) as replicas:
            replicas.on_change(lambda serving: known.set() if serving.facts.conclusive else None)
            async with asyncio.timeout(20):
                await known.wait()
            assert replicas.serving.facts.token_ids_accepted


async def test_a_process_that_answers_again_after_a_silence_is_not_asked_all_anew(tmp_path: Path) -> None:
    async with (
        EngineSim(SimConfig()) as sim,
        EngineSession(LIMITS) as session,
        Replicas(settings(sim.url, tmp_path), session, LIMITS) as replicas,
    ):
        replica = replicas.all[0]
        before, asked = replica.facts, len(sim.generations)
        assert before.conclusive
        sim.set_fault(Fault("status", path="/v1/models", status=503, count=None, probes=True))
        await replica.probe()
        assert not replica.usable
        sim.clear_faults()
        await replica.probe()
        assert replica.usable
        assert replica.facts == before
        assert len(sim.generations) == asked


async def test_another_process_at_the_same_address_is_asked_all_anew(tmp_path: Path) -> None:
    async with (
        EngineSim(SimConfig()) as sim,
        EngineSession(LIMITS) as session,
        Replicas(settings(sim.url, tmp_path), session, LIMITS) as replicas,
    ):
        replica = replicas.all[0]
        asked = len(sim.generations)
        await sim.stop()
        await replica.probe()
        await sim.start()
        await replica.probe()
        assert replica.facts.conclusive
        assert len(sim.generations) > asked


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


async def test_where_others_could_answer_a_request_hardly_lets_shorter_ones_pass(tmp_path: Path) -> None:
    async with EngineSim(SimConfig()) as one, EngineSim(SimConfig()) as two, EngineSession(LIMITS) as session:
        first, both = parse_endpoints(f"one={one.url}"), parse_endpoints(f"one={one.url},two={two.url}")
        async with Replicas(settings(one.url, tmp_path), session, LIMITS, endpoints=first) as replicas:

            def patience() -> list[float]:
                return [replica.pacer.patience for replica in replicas.all if not replica.draining]

            assert patience() == [PATIENCE]
            await replicas.apply(both)
            assert patience() == [ROUTED_PATIENCE, ROUTED_PATIENCE]
            await replicas.apply(first)
            assert patience() == [PATIENCE]


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


async def test_an_engine_that_moves_again_and_again_with_answers_running_is_given_up_each_time(
    tmp_path: Path,
) -> None:
    async with EngineSim(SimConfig()) as one, EngineSim(SimConfig()) as two, EngineSession(LIMITS) as session:
        work = Work(10, None, (), None, None)
        async with Replicas(settings(one.url, tmp_path), session, LIMITS) as replicas:
            parted: list[str] = []
            replicas.on_arrival(lambda replica: None, lambda replica: parted.append(replica.endpoint.url))
            running = []
            for place in range(6):
                _, run = await replicas.enter(work, "salt")
                run.first_token()
                running.append(run)
                await replicas.apply(parse_endpoints((two, one)[place % 2].url))
                if place in (2, 4):
                    running.pop(0).close()
                    await asyncio.sleep(0.05)
            for run in running:
                run.close()
            await until(lambda: len(replicas.all) == 1)
            assert len(parted) == 6
            assert not replicas.all[0].draining


async def test_where_all_engines_are_others_the_old_ones_serve_until_a_new_one_can(tmp_path: Path) -> None:
    async with (
        EngineSim(SimConfig()) as one,
        EngineSim(SimConfig()) as two,
        EngineSession(LIMITS) as session,
        Replicas(settings(one.url, tmp_path), session, LIMITS) as replicas,
    ):
        await two.stop()
        asyncio.get_running_loop().call_later(0.3, lambda: starting.append(asyncio.create_task(two.start())))
        starting: list[asyncio.Task[None]] = []
        applying = asyncio.create_task(replicas.apply(parse_endpoints(f"new={two.url}")))
        seen = set()
        while replicas.get("new") is None:
            replica, run = await replicas.enter(Work(10, None, (), None, None), "salt")
            assert replica.usable
            seen.add(replica.name)
            run.close()
            await asyncio.sleep(0.01)
        await applying
        assert seen == {"engine"}
        assert replicas.model == "sim-model"
        assert replicas.serving.facts.reachable


async def test_what_is_known_of_the_model_stays_while_no_new_engine_answers(tmp_path: Path) -> None:
    async with (
        EngineSim(SimConfig()) as sim,
        EngineSession(LIMITS) as session,
        Replicas(settings(sim.url, tmp_path), session, LIMITS) as replicas,
    ):
        known = replicas.serving.facts
        await sim.stop()
        await replicas.all[0].probe()
        await replicas.apply(parse_endpoints("new=http://127.0.0.1:9"))
        assert [replica.name for replica in replicas.all if not replica.draining] == ["new"]
        assert replicas.serving.facts.model == known.model
        assert replicas.serving.facts.max_model_len == known.max_model_len
        assert not replicas.serving.facts.reachable


async def test_a_request_that_waits_is_waited_for_when_its_engine_leaves(tmp_path: Path) -> None:
    async with (
        EngineSim(SimConfig()) as sim,
        EngineSession(LIMITS) as session,
        Replicas(settings(sim.url, tmp_path), session, LIMITS) as replicas,
    ):
        [replica] = replicas.all
        work = Work(5000, None, (), None, None)
        released = await replica.enter(work, "salt")
        waiting = asyncio.create_task(replica.enter(work, "salt"))
        await asyncio.sleep(0.02)
        assert replica.pacer.queued == 1
        drained = asyncio.create_task(replica.drained())
        released.close()
        await asyncio.sleep(0)
        assert not drained.done()
        (await waiting).close()
        async with asyncio.timeout(1):
            await drained


async def test_who_waits_for_a_replica_that_is_given_up_meanwhile_goes_to_another(tmp_path: Path) -> None:
    async with EngineSim(SimConfig()) as one, EngineSim(SimConfig()) as two, EngineSession(LIMITS) as session:
        both = parse_endpoints(f"one={one.url},two={two.url}")
        async with Replicas(settings(one.url, tmp_path), session, LIMITS, endpoints=both) as replicas:
            work = Work(5000, None, (), None, None)
            entered = [await replicas.enter(work, "salt") for _ in range(2)]
            assert {replica.name for replica, _ in entered} == {"one", "two"}
            waiting = [asyncio.create_task(replicas.enter(work, "salt")) for _ in range(2)]
            await asyncio.sleep(0.02)
            gone, alive = entered[0][0], entered[1][0]
            gone.failed("it hangs")
            for _, run in entered:
                run.close()
            async with asyncio.timeout(2):
                for task in asyncio.as_completed(waiting):
                    replica, run = await task
                    assert replica is alive
                    run.first_token()
                    run.close()
            assert gone.pacer.idle
            assert not gone.in_flight


async def test_a_full_queue_before_one_replica_sends_to_another(tmp_path: Path) -> None:
    async with EngineSim(SimConfig()) as one, EngineSim(SimConfig()) as two, EngineSession(LIMITS) as session:
        both = parse_endpoints(f"one={one.url},two={two.url}")
        given = settings(one.url, tmp_path).model_copy(update={"max_queued": 1})
        async with Replicas(given, session, LIMITS, endpoints=both) as replicas:
            first, second = (replicas.get(name) for name in ("one", "two"))
            assert first is not None
            assert second is not None
            work = Work(5000, None, (), None, None)
            runs = [await first.enter(work, "salt")]
            waiting = asyncio.create_task(first.enter(work, "salt"))
            await asyncio.sleep(0.02)
            # More requests decode at the other one, so that the full one looks better.
            for _ in range(4):
                runs.append(await second.enter(Work(1, None, (), None, None), "salt"))
                runs[-1].first_token()
            replica, run = await replicas.enter(work, "salt")
            assert replica is second
            waiting.cancel()
            await asyncio.wait([waiting])
            for each in [*runs, run]:
                each.close()


async def test_a_trial_that_waits_for_its_turn_keeps_others_away_and_leaves_no_trace_when_its_client_goes(
    tmp_path: Path,
) -> None:
    async with (
        EngineSim(SimConfig()) as sim,
        EngineSession(LIMITS) as session,
        Replicas(settings(sim.url, tmp_path), session, LIMITS) as replicas,
    ):
        [replica] = replicas.all
        work = Work(5000, None, (), None, None)
        blocking = await replica.enter(work, "salt")
        replica.failed("gone")
        await until(lambda: replica.health.state == "half_open")
        trial = asyncio.create_task(replica.enter(work, "salt"))
        await asyncio.sleep(0.02)
        assert not replica.usable, "one tries, the others stay away"
        trial.cancel()
        await asyncio.wait([trial])
        assert replica.usable
        blocking.close()
        assert replica.usable
        assert replica.pacer.idle


async def test_a_strict_request_is_refused_only_where_no_replica_keeps_its_budget(tmp_path: Path) -> None:
    async with EngineSim(SimConfig()) as one, EngineSim(SimConfig()) as two, EngineSession(LIMITS) as session:
        both = parse_endpoints(f"one={one.url},two={two.url}")
        async with Replicas(settings(one.url, tmp_path), session, LIMITS, endpoints=both) as replicas:
            for replica in replicas.all:
                for uncached in (100, 1000, 2000, 4000) * 6:
                    replica.speed.observe(uncached, 0, uncached * 0.001)
            [busy, idle] = replicas.all
            await until(lambda: None not in (busy.speed.estimate, idle.speed.estimate))
            run = await busy.enter(Work(4000, None, (), None, None), "salt")
            prompt = Prompt((), (), None, 500, ())
            foreseen = {
                each.replica: each for each in forecast_plain(prompt, replicas.outlooks("salt"), Clock(None, 0.0))
            }
            assert foreseen[busy.name].queue_s > 1
            work = Work(500, None, (), foreseen[busy.name], None)
            budget = Budget(ttft_s=2.0, strict=True)
            kept = refuse_if_late(replicas.hurried(replicas.forecasts(work, "salt"), None), budget)
            assert kept is not None
            assert kept.replica == idle.name
            run.close()


async def test_engines_that_are_replaced_by_another_model_one_by_one_are_followed_in_the_end(tmp_path: Path) -> None:
    other = SimConfig(model="new-model")
    async with EngineSim(SimConfig()) as one, EngineSim(SimConfig()) as two, EngineSession(LIMITS) as session:
        both = parse_endpoints(f"one={one.url},two={two.url}")
        async with Replicas(settings(one.url, tmp_path), session, LIMITS, endpoints=both) as replicas:
            ports = [one.port, two.port]
            await one.stop()
            async with EngineSim(other, port=ports[0]):
                await until(lambda: replicas.all[0].refused is not None)
                assert replicas.model == "sim-model"
                await two.stop()
                async with EngineSim(other, port=ports[1]):
                    await until(lambda: replicas.model == "new-model" and all(each.usable for each in replicas.all))


async def test_only_a_request_that_has_waited_is_asked_for_its_latest_form(tmp_path: Path) -> None:
    async with (
        EngineSim(SimConfig()) as sim,
        EngineSession(LIMITS) as session,
        Replicas(settings(sim.url, tmp_path), session, LIMITS) as replicas,
    ):
        asked: list[str] = []

        class Shorter:
            def cached_tokens(self, replica: Replica) -> int | None:
                return 1000

            def shared_tokens(self) -> int:
                return 0

            async def latest(self, replica: Replica) -> Work:
                asked.append(replica.name)
                return Work(4000, None, (), None, None)

        _, first = await replicas.enter(Work(5000, None, (), None, None), "salt", waiting=Shorter())
        waiting = asyncio.create_task(replicas.enter(Work(5000, None, (), None, None), "salt", waiting=Shorter()))
        await asyncio.sleep(2 * STALE_S)
        assert asked == []
        first.first_token()
        first.close()
        _, second = await waiting
        assert asked == ["engine"]
        assert second.work.tokens == 4000
        second.close()


async def test_a_request_whose_latest_form_cannot_be_made_gives_its_place_back(tmp_path: Path) -> None:
    async with (
        EngineSim(SimConfig()) as sim,
        EngineSession(LIMITS) as session,
        Replicas(settings(sim.url, tmp_path), session, LIMITS) as replicas,
    ):

        class Broken:
            def cached_tokens(self, replica: Replica) -> int | None:
                return None

            def shared_tokens(self) -> int:
                return 0

            async def latest(self, replica: Replica) -> Work:
                raise ValueError(replica.name)

        _, first = await replicas.enter(Work(5000, None, (), None, None), "salt")
        waiting = asyncio.create_task(replicas.enter(Work(5000, None, (), None, None), "salt", waiting=Broken()))
        await asyncio.sleep(2 * STALE_S)
        first.first_token()
        first.close()
        with pytest.raises(ValueError, match="engine"):
            await waiting
        assert replicas.all[0].pacer.idle
        assert replicas.all[0].in_flight == 0
