from typing import Any

import pytest

from gateway.answers import annotations_wire, citations_wire, plan_wire, read_choices, read_usage, whole_answer
from gateway.errors import ApiError
from gateway.timings import EngineUsage, make_timings, server_timing
from prompt_builder.citations import named_labels
from prompt_builder.types import Dropped, Message, Plan, Prompt, PromptChunk, Segment
from retrieval.types import RenderedChunk

CHUNK = PromptChunk("k7f2a", "file-1", "ferry.md", "Ferry", 0.987654, "At seven.", RenderedChunk("k7f2a", "x", (1,)))


@pytest.mark.parametrize(
    "details", [None, {}, {"cached_tokens": None}, {"cached_tokens": "5"}, [], 0, {"audio_tokens": 0}]
)
def test_a10_cached_tokens_that_are_not_told_are_unknown_not_0(details: Any) -> None:
    usage = read_usage({"usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": details}})
    assert usage == EngineUsage(prompt_tokens=9, cached_tokens=None, output_tokens=2)
    wire = timed(usage).wire()
    assert wire["cached_tokens"] is None
    assert wire["uncached_tokens"] is None
    assert wire["prefill_tokens_per_s"] is None


@pytest.mark.parametrize(
    "choices", [[None], ["x"], {"a": 1}, 5, [{"message": 5}], [{"message": {"content": 5}}], [{"index": "q"}]]
)
def test_choices_that_are_none_are_the_engines_failure(choices: Any) -> None:
    with pytest.raises(ApiError) as failed:
        read_choices({"choices": choices})
    assert failed.value.http_status == 502


def test_choices_without_a_message_are_left_out() -> None:
    said = {"index": 0, "message": {"content": None}}
    assert read_choices({"choices": [said, {"index": 1}, {"message": None}]}) == [said]
    assert read_choices({"choices": None}) == []


@pytest.mark.parametrize("count", [-5, 10**18, True, 1.5])
def test_a10_counts_that_no_engine_can_have_made_are_unknown(count: Any) -> None:
    usage = {"prompt_tokens": count, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": count}}
    assert read_usage({"usage": usage, "metrics": {"queue_time_ms": -1}}) == EngineUsage()


def test_a10_more_cached_tokens_than_the_prompt_has_are_unknown() -> None:
    usage = read_usage({"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 10}}})
    assert usage == EngineUsage(prompt_tokens=9)


def test_a10_zero_cached_tokens_that_are_told_are_zero() -> None:
    usage = read_usage({"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}})
    assert timed(usage).wire()["cached_tokens"] == 0
    assert timed(usage).uncached_tokens == 9


@pytest.mark.parametrize("body", [{}, {"usage": None}, {"usage": []}, {"usage": {}, "metrics": 5}])
def test_no_usage_is_unknown_everywhere(body: dict[str, Any]) -> None:
    assert read_usage(body) == EngineUsage()
    wire = timed(EngineUsage()).wire()
    assert {name for name, value in wire.items() if value is None} >= {"prompt_tokens", "output_tokens", "queue_ms"}


def timed(usage: EngineUsage, first_ms: float | None = 150.0, choices: int = 1) -> Any:
    return make_timings(
        usage, retrieve_ms=20.0, plan_ms=5.0, sent_ms=50.0, first_ms=first_ms, total_ms=650.0, choices=choices
    )


def test_the_parts_add_up_to_the_time_to_first_token() -> None:
    usage = EngineUsage(prompt_tokens=100, cached_tokens=64, output_tokens=11, queue_ms=30.0)
    timings = timed(usage)
    assert timings.ttft_ms == 150.0
    assert 50.0 + timings.queue_ms + timings.prefill_ms == timings.ttft_ms
    assert timings.prefill_tokens_per_s == pytest.approx(36 / 0.07)
    assert timings.decode_tokens_per_s == pytest.approx(10 / 0.5)


def test_an_answer_that_was_not_streamed_uses_the_engines_own_times() -> None:
    told = EngineUsage(prompt_tokens=100, cached_tokens=0, output_tokens=11, queue_ms=30.0, ttft_ms=70.0)
    assert timed(told, None).ttft_ms == 150.0
    unknown = timed(EngineUsage(prompt_tokens=100, cached_tokens=0, output_tokens=11), None)
    assert (unknown.ttft_ms, unknown.prefill_ms, unknown.decode_tokens_per_s) == (None, None, None)


@pytest.mark.parametrize("output", [None, 0, 1])
def test_a_rate_needs_a_token_after_the_first(output: int | None) -> None:
    assert timed(EngineUsage(output_tokens=output)).decode_tokens_per_s is None


def test_the_first_token_of_each_choice_is_prefill() -> None:
    assert timed(EngineUsage(output_tokens=33), choices=3).decode_tokens_per_s == pytest.approx(30 / 0.5)


def test_citations_hold_every_chunk_and_whether_it_is_named() -> None:
    (cited,) = citations_wire([CHUNK], frozenset({"k7f2a"}))
    assert cited == {
        "label": "k7f2a",
        "file_id": "file-1",
        "filename": "ferry.md",
        "title": "Ferry",
        "text": "At seven.",
        "score": 0.9877,
        "named": True,
    }
    assert citations_wire([CHUNK], frozenset())[0]["named"] is False
    assert citations_wire([], frozenset()) == []


def test_annotations_stand_where_the_label_does() -> None:
    answer = "At seven [k7f2a], or (K7F2A)."
    annotations = annotations_wire(named_labels(answer, ["k7f2a"]), [CHUNK])
    assert [answer[item["index"] :][:5].lower() for item in annotations] == ["k7f2a", "k7f2a"]
    assert annotations[0]["type"] == "file_citation"


def test_the_plan_on_the_wire_counts_its_segments() -> None:
    dropped = Dropped("chunk", "k0aaa", "Too long.")
    plan = Plan("s", (), "kept", (CHUNK,), (), "", "", "q", 64, (dropped,))
    segments = (
        Segment("scaffold", "<", (1,)),
        Segment("chunk", "x", (2, 3, 4), "k7f2a"),
        Segment("question", "q", (5,)),
        Segment("scaffold", ">", (6, 7)),
    )
    wire = plan_wire(plan, Prompt(segments, (), (1, 2, 3, 4, 5, 6, 7), 7, ()))
    assert wire["tokens"] == {"scaffold": 3, "chunk": 3, "question": 1}
    assert sum(wire["tokens"].values()) == wire["prompt_tokens"] == 7
    assert wire["chunks"] == [{"label": "k7f2a", "form": "whole", "tokens": 3}]
    assert wire["dropped"] == [{"what": "chunk", "name": "k0aaa", "reason": "Too long."}]
    assert wire["exact"] is True


def test_a_server_timing_leaves_out_what_is_unknown() -> None:
    assert server_timing(retrieve=1.25, queue=None, ttft=100.0) == b"retrieve;dur=1.2, ttft;dur=100.0"


@pytest.mark.parametrize("raw", [b"", b"<html>", b"[]", b"null", b'"text"', b"\xff"])
def test_d6_an_answer_that_is_no_json_object_is_the_engines_fault(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        whole_answer(raw)
    assert (caught.value.http_status, caught.value.code) == (502, "engine_failed")


def test_tokens_of_segments_are_null_where_no_tokenizer_is_known() -> None:
    rendered = RenderedChunk("k7f2a", "[k7f2a] A\nbody\n\n", ())
    chunk = PromptChunk("k7f2a", "file-1", "a.md", "A", 0.9, "body", rendered)
    plan = Plan("", (), "stripped", (chunk,), (), "", "", "why?", None, ())
    segments = (Segment("chunk", chunk.rendered.text, (), "k7f2a"), Segment("question", "why?", ()))
    wire = plan_wire(plan, Prompt(segments, (Message("user", "why?"),), None, 40, (), "no tokenizer"))
    assert wire["tokens"] is None
    assert wire["chunks"] == [{"label": "k7f2a", "form": "whole", "tokens": None}]
    assert wire["prompt_tokens"] == 40
