"""What of the engine's events reaches the client, read by read."""

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import orjson
import pytest

from gateway.backends.sse import DONE
from gateway.backends.vllm import EngineStream
from gateway.errors import ApiError
from gateway.relay import first_place, relay_completed, relay_unchanged
from gateway.timings import EngineUsage


class Reads(EngineStream):
    """A stream whose network reads are given; each holds whole events, as the engine's client makes them."""

    def __init__(self, *reads: bytes) -> None:
        self._reads = reads
        self.closed = False

    async def reads(self) -> AsyncGenerator[bytes]:
        try:
            for data in self._reads:
                yield data
        finally:
            self.closed = True


def event(**fields: Any) -> bytes:
    return b"data: " + orjson.dumps(fields) + b"\n\n"


def said(content: str, finish: str | None = None, index: int = 0) -> bytes:
    return event(id="a", choices=[{"index": index, "delta": {"content": content}, "finish_reason": finish}])


USAGE = event(id="a", choices=[], usage={"prompt_tokens": 7, "completion_tokens": 2})
FAILED = event(error={"message": "it broke", "type": "InternalServerError", "code": 500})


async def unchanged(stream: Reads, wants_usage: bool = False) -> tuple[list[bytes], list[EngineUsage]]:
    usages: list[EngineUsage] = []
    return [data async for data in relay_unchanged(stream, wants_usage, usages.append)], usages


class Finish:
    def __init__(self) -> None:
        self.answers: Mapping[int, str] | None = None
        self.usage: EngineUsage | None = None

    async def __call__(
        self, answers: Mapping[int, str], usage: EngineUsage
    ) -> tuple[dict[str, Any], dict[int, list[dict[str, Any]]]]:
        self.answers, self.usage = dict(answers), usage
        return {"citations": []}, {0: [{"label": "k1"}]}


async def test_d7_reads_without_anything_special_pass_as_they_came() -> None:
    reads = [said("a") + said("b"), b": ping\n\n" + said("c", "stop"), DONE]
    assert await unchanged(Reads(*reads)) == (reads, [])


async def test_d3_a_usage_event_that_nobody_asked_for_is_taken_out_of_its_read_and_no_other_byte() -> None:
    relayed, usages = await unchanged(Reads(said("a") + said("", "stop") + USAGE + DONE))
    assert relayed == [said("a") + said("", "stop") + DONE]
    assert usages == [EngineUsage(prompt_tokens=7, output_tokens=2)]


async def test_d3_a_usage_event_that_was_asked_for_stays_in_its_place() -> None:
    relayed, usages = await unchanged(Reads(said("a", "stop"), USAGE, DONE), wants_usage=True)
    assert relayed == [said("a", "stop"), USAGE, DONE]
    assert len(usages) == 1


async def test_words_like_usage_and_error_in_a_text_are_no_reports() -> None:
    reads = [said('"usage" and "error"'), said("error"), event(choices=[{"delta": {"content": "usage"}}]), DONE]
    assert await unchanged(Reads(*reads)) == (reads, [])


async def test_d13_text_that_came_in_one_read_with_an_error_is_not_lost() -> None:
    relayed = relay_unchanged(Reads(said("a") + said("b") + FAILED + DONE), False, lambda usage: None)
    assert await anext(relayed) == said("a") + said("b")
    with pytest.raises(ApiError, match="it broke"):
        await anext(relayed)


@pytest.mark.parametrize(
    "failed", [FAILED, event(object="error", message="it broke"), event(error="boom"), event(error={})]
)
async def test_d13_engines_report_errors_in_several_shapes(failed: bytes) -> None:
    if failed == event(error={}):
        assert await unchanged(Reads(failed, DONE)) == ([failed, DONE], [])
        return
    with pytest.raises(ApiError, match="reported an error"):
        await unchanged(Reads(failed, DONE))


async def test_d5_a_client_that_leaves_closes_the_reads_at_once() -> None:
    relays: list[Callable[[Reads], AsyncGenerator[bytes]]] = [
        lambda stream: relay_unchanged(stream, False, lambda usage: None),
        lambda stream: relay_completed(stream, False, Finish()),
    ]
    for relay in relays:
        stream = Reads(said("a"), said("b"), DONE)
        relayed = relay(stream)
        await anext(relayed)
        await relayed.aclose()
        assert stream.closed


async def test_c1_the_extension_stands_on_the_chunk_with_the_finish_reason() -> None:
    finish = Finish()
    relayed = [data async for data in relay_completed(Reads(said("a"), said("b", "stop"), USAGE, DONE), True, finish)]
    assert relayed[0] == said("a")
    completed, usage, done = relayed[1].split(b"\n\n")[:3]
    chunk = orjson.loads(completed.removeprefix(b"data: "))
    assert chunk["headstart"] == {"citations": []}
    assert chunk["choices"][0]["finish_reason"] == "stop"
    assert chunk["choices"][0]["delta"] == {"content": "b", "annotations": [{"label": "k1"}]}
    assert usage + b"\n\n" == USAGE
    assert done + b"\n\n" == DONE
    assert finish.answers == {0: "ab"}
    assert finish.usage == EngineUsage(prompt_tokens=7, output_tokens=2, finish_reason="stop")


async def test_c1_with_two_choices_the_extension_comes_once_and_each_has_annotations() -> None:
    reads = [said("a"), said("b", index=1), said("", "stop"), said("c", index=1), said("", "length", 1), USAGE, DONE]
    finish = Finish()
    relayed = b"".join([data async for data in relay_completed(Reads(*reads), False, finish)])
    chunks = [orjson.loads(part.removeprefix(b"data: ")) for part in relayed.split(b"\n\n")[:-2]]
    assert [("headstart" in chunk) for chunk in chunks] == [False, False, False, False, True]
    assert [chunk["choices"][0]["delta"].get("annotations") for chunk in chunks[-2:]] == [[{"label": "k1"}], []]
    assert finish.answers == {0: "a", 1: "bc"}
    assert USAGE not in relayed


async def test_d7_deltas_of_tools_and_reasoning_pass_as_bytes() -> None:
    calls = event(choices=[{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}}])
    thoughts = event(choices=[{"index": 0, "delta": {"reasoning": "hm"}}])
    relayed = [
        data async for data in relay_completed(Reads(calls + thoughts, said("", "stop"), DONE), False, Finish())
    ]
    assert relayed[:2] == [calls, thoughts]


async def test_d5_a_finish_reason_without_an_orderly_end_is_never_sent() -> None:
    relayed = relay_completed(Reads(said("a"), said("", "stop"), FAILED), False, Finish())
    assert await anext(relayed) == said("a")
    with pytest.raises(ApiError):
        await anext(relayed)


async def test_a_stream_without_finish_reason_carries_the_extension_on_a_chunk_without_choices() -> None:
    relayed = [data async for data in relay_completed(Reads(said("a"), USAGE, DONE), False, Finish())]
    assert relayed[1] == event(id="a", choices=[], headstart={"citations": []}) + DONE


@pytest.mark.parametrize("data", [b"", b"xaxax", b"aaaa", b"bab" * 9, b"ab", b"a b ab ab"])
def test_the_first_place_of_a_word_is_found_from_the_end(data: bytes) -> None:
    assert [first_place(data, word) for word in (b"a", b"ab", b"x")] == [data.find(w) for w in (b"a", b"ab", b"x")]
