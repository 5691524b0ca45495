"""Two gateways in front of one engine, without Redis between them: what is told and what is made of it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from bench.virtual_time import VirtualTimeLoop
from cache.blocks import block_hashes
from cache.journal_entries import Batch, Begun, Ended, Event, FirstToken, Malformed, pack, read_batch, split_hashes
from cache.residency import Residency
from gateway.backends.facts import EngineFacts
from gateway.endpoints import Endpoint
from gateway.pacing import Pacer, Prefill
from gateway.runs import Onlooker, Run, Work
from gateway.shared_replica import GONE_S, LONGEST_S, MOST_FOREIGN, SharedReplica, SharingCounts
from gateway.sharing import stream_of
from gateway.timings import EngineUsage
from latency.model import CPU_135M
from latency.speed import SpeedEstimate

SPEED = SpeedEstimate(CPU_135M, factor=1.1, quantile=0.95, samples=50, source="learned")
BLOCK = 16
PROMPT = tuple(range(100, 100 + 20 * BLOCK + 3))


class Deaf:
    def observe(self, uncached_tokens: int, cached_tokens: int, seconds: float, decoding: int = 0) -> None: ...

    def observe_decode(self, output_tokens: int, seconds: float) -> None: ...


def facts(started_s: float | None = 1_000.0, block_size: int = BLOCK) -> EngineFacts:
    return EngineFacts(reachable=True, model="m", block_size=block_size, num_blocks=1_001, started_s=started_s)


@dataclass
class OneReplica:
    """One engine as one gateway sees it."""

    clock: Callable[[], float]
    endpoint: Endpoint = field(default_factory=lambda: Endpoint("engine", "http://10.0.0.1:8000"))
    facts: EngineFacts = field(default_factory=facts)
    residency: Residency | None = field(default_factory=lambda: Residency(BLOCK, 1_000))
    onlooker: Onlooker | None = None

    def __post_init__(self) -> None:
        self.pacer = Pacer(clock=self.clock)
        self.pacer.learned(SPEED)


class Gateway:
    """`tell` gives what it has to say to another, through the packing that goes over the wire."""

    def __init__(self, name: bytes = b"gateway1", **changes: Any) -> None:
        self.clock = asyncio.get_running_loop().time
        self.name = name
        self.counts = SharingCounts()
        self.replica = OneReplica(self.clock, **changes)
        self.shared = SharedReplica(self.replica, self.counts, lambda: None, self.clock)
        self.shared.begin("runs:x")

    async def send(self, token_ids: tuple[int, ...] = PROMPT) -> Run:
        job = Prefill(len(token_ids), 0, SPEED.predict_s(len(token_ids)), None)
        ticket = await self.replica.pacer.enter(job)
        work = Work(len(token_ids), token_ids, (), None, None)
        return Run(
            work, ticket, self.replica.residency, Deaf(), salt="s", decoding=0, onlooker=self.shared, clock=self.clock
        )

    def tell(self, *others: "Gateway") -> list[Batch]:
        batches = [read_batch(pack(batch)) for batch in self.shared.to_tell(self.name, self.clock())]
        for other in others:
            for batch in batches:
                other.shared.heard(batch, self.clock())
        return batches

    @property
    def residency(self) -> Residency:
        assert self.replica.residency is not None
        return self.replica.residency

    @property
    def resident_tokens(self) -> int:
        return self.residency.prefix("s").extended(PROMPT).cached_tokens()


def in_virtual_time(main: Callable[[], Any]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


def test_what_one_gateway_sent_is_resident_for_the_other() -> None:
    async def main() -> None:
        one, two = Gateway(), Gateway(b"gateway2")
        run = await one.send()
        one.tell(two)
        run.first_token()
        run.answered(EngineUsage(prompt_tokens=len(PROMPT), cached_tokens=0, output_tokens=40))
        run.close()
        one.tell(two)
        assert two.resident_tokens == one.resident_tokens == 20 * BLOCK
        assert two.residency.counts().resident_blocks == one.residency.counts().resident_blocks
        assert two.residency.free_blocks == 1_000
        assert (two.shared.foreign_runs, two.replica.pacer.idle, two.replica.pacer.decoding) == (0, True, 0)

    in_virtual_time(main)


@pytest.mark.parametrize("streamed", [True, False])
def test_who_remembers_what_was_sent_is_told_the_blocks_of_others_once(streamed: bool) -> None:
    async def main() -> None:
        one, two = Gateway(), Gateway(b"gateway2")
        told: list[tuple[str, Sequence[bytes]]] = []
        two.shared = SharedReplica(
            two.replica,
            two.counts,
            lambda: None,
            two.clock,
            computed=lambda replica, blocks: told.append((replica.endpoint.name, blocks)),
        )
        two.shared.begin("runs:x")
        run = await one.send()
        one.tell(two)
        assert not told
        if streamed:
            run.first_token()
        run.answered(EngineUsage(prompt_tokens=len(PROMPT), cached_tokens=0, output_tokens=40))
        run.close()
        one.tell(two)
        assert told == [("engine", block_hashes(PROMPT, BLOCK, "s"))]

    in_virtual_time(main)


def test_a_prefill_of_another_gateway_is_part_of_the_wait_until_its_first_token() -> None:
    async def main() -> None:
        one, two = Gateway(), Gateway(b"gateway2")
        run = await one.send()
        one.tell(two)
        seconds = SPEED.predict_s(len(PROMPT))
        assert two.replica.pacer.wait_s(0.1) == pytest.approx(one.replica.pacer.wait_s(0.1)) == pytest.approx(seconds)
        assert two.replica.pacer.in_flight_tokens == len(PROMPT)
        run.first_token()
        one.tell(two)
        assert two.replica.pacer.wait_s(0.1) == 0.0
        assert (two.replica.pacer.in_flight_tokens, two.replica.pacer.decoding) == (0, 1)
        run.close()
        one.tell(two)
        assert two.replica.pacer.decoding == 0

    in_virtual_time(main)


def test_a_prompt_abandoned_before_its_first_token_is_not_believed_to_be_there() -> None:
    async def main() -> None:
        one, two = Gateway(), Gateway(b"gateway2")
        run = await one.send()
        one.tell(two)
        run.close()
        one.tell(two)
        assert two.resident_tokens == one.resident_tokens == 0
        assert two.shared.foreign_runs == 0

    in_virtual_time(main)


def test_a_gateway_that_falls_silent_leaves_no_load_behind() -> None:
    async def main() -> None:
        one, two = Gateway(), Gateway(b"gateway2")
        first = await one.send()
        first.first_token()
        asyncio.create_task(one.send(tuple(range(3_000)))).add_done_callback(lambda task: None)
        await asyncio.sleep(0)
        waiting = asyncio.create_task(one.send(tuple(range(5_000, 9_000))))
        await asyncio.sleep(0.1)
        one.tell(two)
        assert two.shared.foreign_runs == 2
        assert two.replica.pacer.wait_s(0.1) > SPEED.predict_s(3_000) + SPEED.predict_s(4_000) - 0.2, (
            "what waits there counts too"
        )
        await asyncio.sleep(GONE_S - 0.2)
        two.shared.tend(two.clock())
        assert two.shared.foreign_runs == 2
        await asyncio.sleep(0.5)
        two.shared.tend(two.clock())
        assert two.shared.foreign_runs == 0
        assert two.replica.pacer.wait_s(0.1) == 0.0
        assert two.residency.free_blocks == 1_000
        assert two.shared.gateways() == set()
        waiting.cancel()

    in_virtual_time(main)


def test_a_gateway_with_requests_on_the_way_says_that_it_is_there() -> None:
    async def main() -> None:
        one, two = Gateway(), Gateway(b"gateway2")
        run = await one.send()
        one.tell(two)
        for _ in range(20):
            await asyncio.sleep(1.0)
            assert one.shared.is_due(one.clock())
            one.tell(two)
            two.shared.tend(two.clock())
            assert two.shared.foreign_runs == 1
        run.close()
        assert one.tell(two)[0].events == [Ended(1, None, None)]
        await asyncio.sleep(5.0)
        assert not one.shared.is_due(one.clock())
        assert one.tell(two) == []

    in_virtual_time(main)


def test_a_prefill_that_never_ends_and_an_answer_that_never_ends_are_given_up() -> None:
    async def main() -> None:
        one, two = Gateway(), Gateway(b"gateway2")
        await one.send()
        for passed_s in (4.9, 0.3):
            one.tell(two)
            await asyncio.sleep(passed_s)
            one.tell(two)
            two.shared.tend(two.clock())
        assert two.replica.pacer.in_flight_tokens == 0
        assert two.shared.foreign_runs == 1
        two.shared.heard(Batch(b"gateway1", 1_000.0, 0.0, None, []), two.clock() + LONGEST_S)
        two.shared.tend(two.clock() + LONGEST_S)
        assert two.shared.foreign_runs == 0

    in_virtual_time(main)


def test_the_past_is_heard_as_it_went() -> None:
    """A window of half an hour, heard in a moment: nobody in it is gone before the end of what he sent is heard."""

    async def main() -> None:
        two = Gateway(b"gateway2")
        hashes = b"".join(block_hashes(PROMPT, BLOCK, "s"))
        begun = Begun(1, len(PROMPT), hashes, len(PROMPT), 0, 0.4)
        now_s = two.clock()
        two.shared.heard(Batch(b"gateway1", 1_000.0, 0.0, None, [begun]), now_s - 1_800)
        two.shared.tend(now_s)
        assert two.replica.pacer.wait_s(0.1) == 0.0, "a prefill of then is no load now"
        two.shared.heard(Batch(b"gateway1", 1_000.0, 0.0, None, [FirstToken(1), Ended(1, 0, 5)]), now_s - 1_799)
        two.shared.tend(now_s)
        assert two.resident_tokens == 20 * BLOCK
        two.shared.heard(Batch(b"gateway1", 1_000.0, 3.0, 0.5, [begun]), now_s - 1_000)
        await asyncio.sleep(1.1)
        two.shared.tend(two.clock())
        assert two.shared.foreign_runs == 0
        assert two.replica.pacer.wait_s(0.1) == 0.0

    in_virtual_time(main)


def test_entries_of_another_run_of_the_engine_do_not_count() -> None:
    async def main() -> None:
        one, two = Gateway(facts=facts(started_s=900.0)), Gateway(b"gateway2")
        await one.send()
        one.tell(two)
        assert two.shared.foreign_runs == 0
        assert two.counts.other_epoch == 1

    in_virtual_time(main)


def test_of_an_engine_that_does_not_tell_its_age_only_what_comes_from_now_on_counts() -> None:
    async def main() -> None:
        one = Gateway(facts=facts(started_s=None))
        await asyncio.sleep(1.0)
        two = Gateway(b"gateway2", facts=facts(started_s=None))
        await one.send()
        [batch] = one.tell()
        two.shared.heard(batch, two.clock() - 0.5)
        assert two.shared.foreign_runs == 0
        two.shared.heard(batch, two.clock())
        assert two.shared.foreign_runs == 1

    in_virtual_time(main)


def test_a_restarted_engine_is_begun_with_anew() -> None:
    async def main() -> None:
        one, two = Gateway(), Gateway(b"gateway2")
        run = await one.send()
        one.tell(two)
        two.replica.facts = facts(started_s=2_000.0)
        two.replica.residency = Residency(BLOCK, 1_000)
        assert two.shared.is_outdated()
        two.shared.close()
        two.shared.begin("runs:x")
        assert (two.shared.foreign_runs, two.replica.pacer.wait_s(0.1)) == (0, 0.0)
        run.first_token()
        run.close()
        one.tell(two)
        assert two.resident_tokens == 0

    in_virtual_time(main)


def test_what_runs_on_a_restarted_engine_is_not_told_of_the_one_before() -> None:
    async def main() -> None:
        one = Gateway()
        one.replica.facts = facts(started_s=2_000.0)
        await one.send()
        assert [event for batch in one.tell() for event in batch.events] == []

    in_virtual_time(main)


def test_hashes_that_cannot_be_are_refused_and_do_no_harm() -> None:
    async def main() -> None:
        two = Gateway(b"gateway2")
        with pytest.raises(Malformed):
            two.shared.heard(Batch(b"gateway1", 1_000.0, 0.0, None, [Begun(1, 64, b"x" * 33, 64, 0, 0.1)]), 0.0)
        assert two.shared.foreign_runs == 0
        assert two.replica.pacer.idle

    in_virtual_time(main)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 40,
        b"\x93\x01\x02\x03",
        pack(Batch(b"short", 1.0, 0.0, None, [])),
        pack(Batch(b"gateway1", 1.0, -1.0, None, [])),
        pack(Batch(b"gateway1", 1.0, float("nan"), None, [])),
        pack(Batch(b"gateway1", 1.0, 0.0, None, [Begun(-1, 1, b"", 1, 0, 0.1)])),
        pack(Batch(b"gateway1", 1.0, 0.0, None, [Begun(1, 2**40, b"", 1, 0, 0.1)])),
        pack(Batch(b"gateway1", 1.0, 0.0, None, [FirstToken(1)] * 513)),
    ],
)
def test_entries_of_wrong_types_and_sizes_are_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        read_batch(data)


def test_a_prompt_whose_hashes_were_not_told_takes_blocks_that_nothing_hits() -> None:
    assert split_hashes(b"", 64, BLOCK) is None
    assert split_hashes(b"", 15, BLOCK) == []

    async def main() -> None:
        two = Gateway(b"gateway2", residency=Residency(BLOCK, 10))
        events: list[Event] = [Begun(1, 64, b"", 64, 0, 0.1), FirstToken(1), Ended(1, 0, 16)]
        two.shared.heard(Batch(b"gateway1", 1_000.0, 0.0, None, events), two.clock())
        assert two.residency.free_blocks == 10
        assert two.shared.foreign_runs == 0

    in_virtual_time(main)


def test_requests_of_others_are_bounded() -> None:
    async def main() -> None:
        two = Gateway(b"gateway2", residency=None)
        for start in range(0, MOST_FOREIGN + 100, 100):
            events: list[Event] = [Begun(number, 10, b"", 10, 0, 0.01) for number in range(start, start + 100)]
            two.shared.heard(Batch(b"gateway1", 1_000.0, 0.0, None, events), two.clock())
        assert two.shared.foreign_runs == MOST_FOREIGN
        assert two.counts.left_out > 0

    in_virtual_time(main)


def test_gateways_take_turns_by_who_waits_longest_and_never_release_twice_as_much() -> None:
    async def main() -> None:
        one, two = Gateway(), Gateway(b"gateway2")
        order: list[tuple[bytes, float]] = []
        most = [0]
        engine = asyncio.Lock()

        async def request(gateway: Gateway, other: Gateway) -> None:
            entered_s = gateway.clock()
            run = await gateway.send(tuple(range(len(order) * 1_000, len(order) * 1_000 + 500)))
            order.append((gateway.name, entered_s))
            most[0] = max(most[0], sum(entry.replica.pacer.in_flight_tokens for entry in (one, two)) // 2)
            async with engine:
                await asyncio.sleep(run.prefill.seconds)
            run.first_token()
            run.close()

        async def telling() -> None:
            while True:
                await asyncio.sleep(0.005)
                one.tell(two)
                two.tell(one)

        teller = asyncio.create_task(telling())
        requests = []
        for number in range(20):
            pair = (one, two) if number % 4 else (two, one)
            requests.append(asyncio.create_task(request(*pair)))
            await asyncio.sleep(0.02)
        began_s = one.clock()
        await asyncio.gather(*requests)
        took_s = one.clock() - began_s
        teller.cancel()
        entered = [entered_s for _, entered_s in order]
        late = sum(entered_s < max(entered[: place + 1]) - 0.05 for place, entered_s in enumerate(entered))
        assert late <= 2, f"nobody is passed by those who came long after: {order}"
        assert most[0] <= 1_500, "in flight at both together"
        assert took_s < 20 * SPEED.predict_s(500) * 1.05, "taking turns leaves the engine no time without work"

    in_virtual_time(main)


def test_a_gateway_whose_turn_it_is_and_that_does_not_go_holds_nobody_up() -> None:
    async def main() -> None:
        two = Gateway(b"gateway2")
        await asyncio.sleep(1.0)
        two.shared.heard(Batch(b"gateway1", 1_000.0, 2.0, 0.5, []), two.clock())
        began_s = two.clock()
        await two.send()
        assert two.clock() - began_s == pytest.approx(0.03, abs=0.01)

    in_virtual_time(main)


def test_the_name_of_a_stream_holds_no_address() -> None:
    async def main() -> None:
        one, two = OneReplica(lambda: 0.0), OneReplica(lambda: 0.0)
        stream = stream_of(one)
        assert stream is not None
        assert stream == stream_of(two)
        assert "10.0.0.1" not in stream
        two.endpoint = Endpoint("engine", "http://10.0.0.2:8000")
        assert stream != stream_of(two)
        two.facts = EngineFacts(reachable=True)
        assert stream_of(two) is None

    asyncio.run(main())
