"""A request's stay on a replica: what it teaches, what it leaves in the cache, and that everything comes back."""

import asyncio
from collections.abc import Callable

import pytest

from cache.blocks import block_hashes
from cache.hash_memo import HashMemo
from cache.residency import Residency
from gateway.pacing import Pacer, Prefill
from gateway.runs import MANY_BLOCKS, Run, Work
from gateway.timings import EngineUsage

BLOCK = 4
PROMPT = tuple(range(100, 117))
JOB = Prefill(uncached_tokens=17, cached_tokens=0, seconds=0.1, deadline_s=None)


class Learned:
    """Notes what is taught."""

    def __init__(self) -> None:
        self.prefills: list[tuple[int, int, float, int]] = []
        self.decodes: list[tuple[int, float]] = []

    def observe(self, uncached_tokens: int, cached_tokens: int, seconds: float, decoding: int = 0) -> None:
        self.prefills.append((uncached_tokens, cached_tokens, round(seconds, 6), decoding))

    def observe_decode(self, output_tokens: int, seconds: float) -> None:
        self.decodes.append((output_tokens, round(seconds, 6)))


class Scene:
    """One replica under a clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.pacer = Pacer(enabled=False, clock=self.clock)
        self.residency = Residency(BLOCK, 100)
        self.learned = Learned()

    def clock(self) -> float:
        return self.now_s

    async def run(self, choices: int = 1, token_ids: tuple[int, ...] | None = PROMPT) -> Run:
        ticket = await self.pacer.enter(JOB)
        work = Work(len(PROMPT), token_ids, (), None, None, choices)
        return Run(work, ticket, self.residency, self.learned, salt="s", decoding=2, clock=self.clock)

    def resident(self) -> int:
        return self.residency.prefix("s").extended(PROMPT).resident_tokens


def usage(cached: int | None = 0, queue_ms: float | None = None, output: int = 5) -> EngineUsage:
    return EngineUsage(prompt_tokens=17, cached_tokens=cached, output_tokens=output, queue_ms=queue_ms)


async def answered(scene: Scene, run: Run, told: EngineUsage) -> None:
    scene.now_s += 0.25
    run.first_token()
    scene.now_s += 0.4
    run.answered(told)
    run.close()


@pytest.mark.parametrize("rendered_for", [BLOCK, BLOCK + 1, 2 * BLOCK])
async def test_a_prompt_rendered_for_another_block_size_leaves_the_blocks_of_this_replica(rendered_for: int) -> None:
    """15 tokens are three blocks of 4, as many of 5, and one of 8."""
    scene, ids = Scene(), tuple(range(100, 115))
    hashes = block_hashes(ids, rendered_for, "s")
    ticket = await scene.pacer.enter(JOB)
    work = Work(len(ids), ids, hashes, None, None)
    run = Run(work, ticket, scene.residency, scene.learned, salt="s", decoding=0, clock=scene.clock)
    await answered(scene, run, usage())
    assert tuple(run.hashes) == block_hashes(ids, BLOCK, "s")
    assert scene.residency.prefix("s").extended(ids).resident_tokens == len(ids) // BLOCK * BLOCK


async def test_prefill_and_decode_of_an_answer_are_learned() -> None:
    scene = Scene()
    await answered(scene, await scene.run(), usage(cached=0))
    assert scene.learned.prefills == [(17, 0, 0.25, 2)]
    assert scene.learned.decodes == [(4, 0.4)]


async def test_the_wait_in_the_engines_queue_is_no_prefill() -> None:
    scene = Scene()
    await answered(scene, await scene.run(), usage(queue_ms=100.0))
    assert scene.learned.prefills == [(17, 0, 0.15, 2)]


async def test_a_prefill_that_shared_its_step_teaches_nothing_of_itself() -> None:
    scene = Scene()
    first, second = await scene.run(), await scene.run()
    await answered(scene, first, usage())
    await answered(scene, second, usage())
    assert scene.learned.prefills == []
    assert len(scene.learned.decodes) == 2


@pytest.mark.parametrize("told", [usage(cached=None), EngineUsage()])
async def test_a_10_what_the_engine_does_not_tell_is_not_learned(told: EngineUsage) -> None:
    scene = Scene()
    await answered(scene, await scene.run(), told)
    assert scene.learned.prefills == []


async def test_several_choices_teach_no_rate() -> None:
    scene = Scene()
    await answered(scene, await scene.run(choices=3), usage())
    assert (scene.learned.prefills, scene.learned.decodes) == ([], [])


async def test_an_answered_prompt_stays_in_the_picture_and_the_next_is_predicted_from_it() -> None:
    scene = Scene()
    await answered(scene, await scene.run(), usage())
    again = await scene.run()
    assert again.cached_tokens == 16
    again.close()
    assert scene.residency.counts().exact == 1


async def test_a_stream_abandoned_after_its_first_token_leaves_its_prompt_in_the_cache() -> None:
    scene = Scene()
    run = await scene.run()
    run.first_token()
    run.close()
    assert scene.resident() == 16


async def test_a_request_abandoned_before_its_first_token_leaves_nothing() -> None:
    scene = Scene()
    (await scene.run()).close()
    assert scene.resident() == 0


async def test_closing_twice_is_closing_once() -> None:
    scene = Scene()
    run = await scene.run()
    run.first_token()
    run.close()
    run.close()
    assert scene.pacer.idle
    assert scene.pacer.decoding == 0


async def test_a_prompt_that_only_the_engine_knows_has_no_prediction() -> None:
    scene = Scene()
    run = await scene.run(token_ids=None)
    assert run.cached_tokens is None
    await answered(scene, run, usage())
    assert scene.learned.prefills == [(17, 0, 0.25, 2)]


async def test_a_whole_answer_of_which_nothing_is_foretold_does_not_hold_up_the_next_prefill() -> None:
    scene = Scene()
    run = await scene.run()
    run.first_token_expected()
    await asyncio.sleep(0.01)
    assert scene.pacer.idle
    assert scene.pacer.decoding == 1
    run.close()
    assert scene.pacer.decoding == 0


async def test_an_answer_that_comes_whole_takes_blocks_while_streams_beside_it_go_on() -> None:
    scene = Scene()
    streamed, whole = await scene.run(), await scene.run()
    whole.first_token_expected()
    streamed.first_token()
    free = scene.residency.free_blocks
    for tokens in range(2, 10):
        streamed.streamed(tokens)
    # 17 tokens of a prompt and eight of an answer that are computed or about to be fill seven blocks; both had five.
    assert scene.residency.free_blocks == free - 4
    whole.answered(usage(output=2))
    whole.close()
    streamed.close()
    for tokens in range(10, 40):
        streamed.streamed(tokens)
    assert scene.residency.free_blocks == 100


class Heard:
    """An onlooker that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def began(self, run: Run) -> None:
        self.told.append(f"began with {len(run.hashes)} hashes")

    def first_token(self, run: Run) -> None:
        self.told.append("first token")

    def ended(self, run: Run, usage: EngineUsage | None) -> None:
        self.told.append("ended")


async def leaving(scene: Scene, heard: Heard) -> tuple[Run, list[Callable[[], None]]]:
    """A run whose blocks are taken in a moment, and what is to be called then."""
    later: list[Callable[[], None]] = []
    work = Work(len(PROMPT), PROMPT, (), None, None)
    ticket = await scene.pacer.enter(JOB)
    run = Run(
        work,
        ticket,
        scene.residency,
        scene.learned,
        salt="s",
        decoding=0,
        onlooker=heard,
        clock=scene.clock,
        soon=later.append,
    )
    return run, later


async def test_blocks_are_taken_in_a_moment_and_once() -> None:
    scene, heard = Scene(), Heard()
    run, later = await leaving(scene, heard)
    assert (scene.residency.free_blocks, heard.told) == (scene.residency.capacity_blocks, [])
    for call in (*later, *later):
        call()
    assert scene.residency.free_blocks == scene.residency.capacity_blocks - 5
    await answered(scene, run, usage())
    assert heard.told == ["began with 4 hashes", "first token", "ended"]
    assert scene.resident() == 16


async def test_an_answer_that_comes_before_that_moment_is_counted_like_any_other() -> None:
    scene, heard = Scene(), Heard()
    run, later = await leaving(scene, heard)
    await answered(scene, run, usage())
    for call in later:
        call()
    assert heard.told == ["began with 4 hashes", "first token", "ended"]
    assert scene.resident() == 16
    assert scene.residency.free_blocks == scene.residency.capacity_blocks


async def test_a_request_that_never_leaves_takes_nothing_and_nobody_hears_of_it() -> None:
    scene, heard = Scene(), Heard()
    run, later = await leaving(scene, heard)
    run.close()
    for call in later:
        call()
    assert heard.told == []
    assert scene.residency.free_blocks == scene.residency.capacity_blocks
    assert scene.pacer.idle


async def test_thousands_of_blocks_are_hashed_in_one_turn_of_the_loop_and_taken_in_the_next() -> None:
    scene = Scene()
    scene.residency = Residency(BLOCK, 5000)
    ids = tuple(range(BLOCK * (MANY_BLOCKS + 100)))
    hashes = HashMemo().late_hashes(ids, BLOCK, "s")
    later: list[Callable[[], None]] = []
    ticket = await scene.pacer.enter(JOB)
    work = Work(len(ids), ids, hashes, None, None)
    run = Run(work, ticket, scene.residency, scene.learned, salt="s", decoding=0, soon=later.append)
    later.pop()()
    assert hashes.unmade == 0
    assert scene.residency.free_blocks == scene.residency.capacity_blocks
    later.pop()()
    assert scene.residency.free_blocks == scene.residency.capacity_blocks - len(hashes)
    run.close()
