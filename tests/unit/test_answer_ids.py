"""An answer's ids from its text: believed where their number agrees with the engine's, and found after the end."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from cache.residency import Residency
from gateway.answer_ids import NamedAnswer, agreeing
from gateway.pacing import Pacer, Prefill
from gateway.runs import Run, Work
from gateway.streamed_text import MOST_BYTES, StreamedText
from gateway.timings import EngineUsage

BLOCK = 4
PROMPT = tuple(range(100, 118))


class NoLessons:
    def observe(self, uncached_tokens: int, cached_tokens: int, seconds: float, decoding: int = 0) -> None: ...

    def observe_decode(self, output_tokens: int, seconds: float) -> None: ...


def encode(text: str) -> Sequence[int]:
    return [1000 + ord(letter) for letter in text]


async def all_done() -> None:
    """Waits until what is scheduled has run, in the loop and on the only thread behind it."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    for _ in range(3):
        await asyncio.sleep(0)
    await loop.run_in_executor(None, int)
    for _ in range(3):
        await asyncio.sleep(0)


async def answered(
    residency: Residency, text: str, *, counted: int, finish: str | None = "stop", choices: int = 1
) -> int:
    """Resident tokens of prompt and answer once the run is over."""
    ticket = await Pacer(enabled=False).enter(Prefill(len(PROMPT), 0, 0.1, None))
    work = Work(len(PROMPT), PROMPT, (), None, None, choices)
    run = Run(work, ticket, residency, NoLessons(), salt="s", decoding=0)
    run.first_token()
    usage = EngineUsage(len(PROMPT), 0, counted, finish_reason=finish)
    run.answered(usage, NamedAnswer(lambda: text, encode))
    run.close()
    await all_done()
    return residency.prefix("s").extended([*PROMPT, *encode(text), 7, 8, 9]).resident_tokens


async def test_an_answer_that_ended_itself_has_one_token_more_than_its_text() -> None:
    assert await answered(Residency(BLOCK, 50), "abcdefghij", counted=11) == 28


async def test_an_answer_that_was_cut_has_the_tokens_of_its_text_and_the_last_is_not_computed() -> None:
    assert await answered(Residency(BLOCK, 50), "abcdefghij", counted=10, finish="length") == 24


@pytest.mark.parametrize(
    ("counted", "finish"), [(10, "stop"), (12, "stop"), (11, "length"), (11, None), (11, "tool_calls")]
)
async def test_where_the_counts_disagree_nothing_is_named(counted: int, finish: str | None) -> None:
    residency = Residency(BLOCK, 50)
    assert await answered(residency, "abcdefghij", counted=counted, finish=finish) == 16
    assert residency.free_blocks == 50


async def test_several_choices_name_nothing() -> None:
    assert await answered(Residency(BLOCK, 50), "abcdefghij", counted=11, choices=2) == 16


async def test_a_long_answer_is_encoded_beside_the_loop() -> None:
    text = "a" * 9000
    assert await answered(Residency(BLOCK, 5000), text, counted=9001) == (len(PROMPT) + 9000) // BLOCK * BLOCK


async def test_what_was_evicted_meanwhile_is_not_named() -> None:
    residency = Residency(BLOCK, 8)
    lease = residency.begin(PROMPT, "s")
    residency.answered(lease, 11)
    residency.end(lease)
    for start in (500, 600):
        other = residency.begin(range(start, start + 16))
        residency.generated(other, ())
        residency.end(other)
    residency.answered(lease, 11, encode("abcdefghij"))
    assert residency.prefix("s").extended([*PROMPT, *encode("abcdefghij")]).resident_tokens == 0
    assert residency.free_blocks == 8
    assert residency.counts().resident_blocks == 8


async def test_blocks_that_an_answer_takes_while_it_streams_evict_others_at_once() -> None:
    residency = Residency(BLOCK, 8)
    old = residency.begin(range(12))
    residency.generated(old, ())
    residency.end(old)
    ticket = await Pacer(enabled=False).enter(Prefill(len(PROMPT), 0, 0.1, None))
    run = Run(Work(18, PROMPT, (), None, None), ticket, residency, NoLessons(), salt="s", decoding=0)
    run.first_token()
    assert residency.prefix().extended(range(12)).resident_tokens == 12
    for tokens in (1, 2, 3):
        run.streamed(tokens)
    assert residency.prefix().extended(range(12)).resident_tokens == 12
    run.streamed(4)
    assert residency.prefix().extended(range(12)).resident_tokens == 8
    run.streamed(8)
    assert residency.prefix().extended(range(12)).resident_tokens == 4
    run.close()


def test_only_what_ended_by_itself_or_at_its_limit_can_agree() -> None:
    assert agreeing([1, 2], EngineUsage(output_tokens=3, finish_reason="stop"))
    assert agreeing([1, 2], EngineUsage(output_tokens=2, finish_reason="length"))
    assert not agreeing([1, 2], EngineUsage(output_tokens=2, finish_reason="stop"))
    assert not agreeing([1, 2], EngineUsage(finish_reason="stop"))


def event(content: str, finish: str = "null") -> bytes:
    return (
        b'data: {"id":"x","choices":[{"index":0,"delta":{"content":%b},"logprobs":null,"finish_reason":%b}]}\n\n'
        % (content.encode(), finish.encode())
    )


ROLE = b'data: {"id":"x","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'


def test_a_stream_that_passes_unread_is_put_together_when_it_is_over() -> None:
    said = StreamedText()
    reads = [ROLE + event('"He said \\"delta\\":{ \\u2028"'), event('"caf\u00e9"'), event('""', '"stop"')]
    counts = [said.add(read) for read in reads]
    assert said.text() == 'He said "delta":{ \u2028caf\u00e9'
    assert said.finish_reason() == "stop"
    # Until it is over one more is on its way.
    assert counts == [2, 3, 3]


def test_tool_calls_and_answers_of_a_megabyte_are_not_put_together() -> None:
    said = StreamedText()
    said.add(b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"id":"1"}]}}]}\n\n')
    assert said.text() is None
    long = StreamedText()
    long.add(event('"' + "a" * MOST_BYTES + '"'))
    assert long.text() is None
