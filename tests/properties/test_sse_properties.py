"""However the network cuts a stream of events, the events are the same."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.backends.sse import EventSplitter, event_data, split_events

LINE = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)
ENDS = st.sampled_from(["\n", "\r\n"])


@st.composite
def an_event(draw: st.DrawFn) -> bytes:
    end = draw(ENDS)
    lines = draw(
        st.lists(st.tuples(st.sampled_from(["data: ", "data:", ": ", "id: "]), LINE), min_size=1, max_size=3)
    )
    return (end.join(field + text for field, text in lines) + end + end).encode()


EVENTS = st.lists(an_event(), max_size=8)


@st.composite
def pieces(draw: st.DrawFn, whole: bytes) -> list[bytes]:
    cuts = sorted(draw(st.sets(st.integers(0, len(whole)))))
    return [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


@given(EVENTS, st.data())
def test_d12_events_split_anywhere_equal_the_whole(events: list[bytes], data: st.DataObject) -> None:
    splitter = EventSplitter()
    found = [event for piece in data.draw(pieces(b"".join(events))) for event in splitter.feed(piece)]
    assert found == events
    assert splitter.empty


@given(st.binary(max_size=200), st.data())
def test_no_byte_is_lost_whatever_comes(noise: bytes, data: st.DataObject) -> None:
    splitter = EventSplitter()
    found = [event for piece in data.draw(pieces(noise)) for event in splitter.feed(piece)]
    assert b"".join(found) + splitter.rest == noise


@given(EVENTS)
def test_events_that_came_together_are_told_apart(events: list[bytes]) -> None:
    assert split_events(b"".join(events)) == events


@given(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])), ENDS)
def test_d1_a_payload_comes_back_whatever_separators_of_unicode_it_holds(text: str, end: str) -> None:
    assert event_data(f"data: {text}{end}{end}".encode()) == text.encode()
