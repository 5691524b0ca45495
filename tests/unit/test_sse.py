"""Events as bytes: where they end, what they carry."""

import time

import pytest

from gateway.backends.sse import EventSplitter, EventTooLarge, data_event, event_data, is_usage_only, split_events


def test_events_come_whole_and_with_their_terminators() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\n\ndata: b") == [b"data: a\n\n"]
    assert splitter.rest == b"data: b"
    assert splitter.feed(b"\n") == []
    assert splitter.feed(b"\ndata: c\r\n\r\n") == [b"data: b\n\n", b"data: c\r\n\r\n"]
    assert splitter.empty


def test_a_terminator_cut_in_its_middle_still_ends_the_event() -> None:
    splitter = EventSplitter()
    fed = [splitter.feed(piece) for piece in (b"data: a\r", b"\n", b"\r", b"\n")]
    assert fed == [[], [], [], [b"data: a\r\n\r\n"]]


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c"])
def test_d1_only_line_feeds_and_carriage_returns_end_a_line(character: str) -> None:
    event = f'data: {{"content":"a{character}b"}}\n\n'.encode()
    assert EventSplitter().feed(event) == [event]
    assert event_data(event) == f'{{"content":"a{character}b"}}'.encode()


def test_d2_a_letter_cut_in_two_is_never_decoded() -> None:
    event = "data: Ấ🚢\n\n".encode()
    splitter = EventSplitter()
    found = [whole for i in range(len(event)) for whole in splitter.feed(event[i : i + 1])]
    assert found == [event]


def test_d12_an_event_over_the_bound_is_refused_and_one_at_the_bound_is_not() -> None:
    splitter = EventSplitter(limit_bytes=100)
    assert splitter.feed(b"x" * 100) == []
    with pytest.raises(EventTooLarge):
        splitter.feed(b"x")


def test_d12_a_megabyte_byte_by_byte_takes_time_in_proportion_to_its_length() -> None:
    def seconds(size: int) -> float:
        splitter = EventSplitter()
        began = time.perf_counter()
        for _ in range(size):
            splitter.feed(b"x")
        return time.perf_counter() - began

    seconds(1000)
    assert seconds(200_000) < 40 * max(seconds(20_000), 0.005)


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: a\n\n", b"a"),
        (b"data:a\n\n", b"a"),
        (b"data:  a\n\n", b" a"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"event: x\r\ndata: a\r\nid: 1\r\n\r\n", b"a"),
        (b": keep-alive\n\n", b""),
        (b"data\n\n", b""),
    ],
)
def test_the_payload_is_what_the_data_lines_hold(event: bytes, data: bytes) -> None:
    assert event_data(event) == data


def test_keep_alives_between_events_are_events_of_their_own() -> None:
    assert split_events(b": ping\n\ndata: a\n\n") == [b": ping\n\n", b"data: a\n\n"]


@pytest.mark.parametrize(
    ("event", "usage_only"),
    [
        (b'data: {"choices":[],"usage":{}}\n\n', True),
        (b'data: {"choices" : [ ],"usage":{}}\n\n', True),
        (b'data: {"choices":[{"index":0}],"usage":{}}\n\n', False),
        (b'data: {"choices":[{"delta":{"content":"\\"choices\\":[]"}}]}\n\n', False),
    ],
)
def test_d3_a_usage_event_is_one_without_choices(event: bytes, usage_only: bool) -> None:
    assert is_usage_only(event) is usage_only


def test_an_event_that_is_made_reads_back() -> None:
    assert event_data(data_event(b'{"a":1}')) == b'{"a":1}'
