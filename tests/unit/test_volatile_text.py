"""Which system texts are told to be volatile, what is said of them, and what is moved."""

import pytest

from gateway.volatile import MOST_KEPT_CHARS, MOST_TEXTS, Observed, SystemTexts, VolatileText
from prompt_builder.labels import FACTS_MARK
from prompt_builder.movable import split
from prompt_builder.types import Transcript
from prompt_builder.versions import WINDOW
from prompt_builder.volatile import kind_of, matched

RULES = [f"Rule {number}: {rule}" for number, rule in enumerate(("be brief", "be kind", "cite", "ask", "stop") * 4)]


def words(text: str) -> int:
    return len(text.split())


def with_lines(*lines: str, at: int = 3) -> str:
    return "\n".join([*RULES[:at], *lines, *RULES[at:]])


def clock(minute: int) -> str:
    return with_lines(f"Current time: 12:{minute:02d}")


class Asked:
    """One gateway's memory, asked as tenant `t` for model `m`."""

    def __init__(self, mode: str = "report") -> None:
        self.texts = SystemTexts(mode)  # type: ignore[arg-type]

    def seen(self, *texts: str, tenant: str = "t", model: str = "m") -> Observed:
        for text in texts:
            last = self.texts.observe(tenant, model, text, words)
        return last

    def told(self, *texts: str) -> VolatileText | None:
        return self.seen(*texts).report


def test_a3_a_clock_in_the_system_text_is_reported_with_its_line() -> None:
    report = Asked().told(*(clock(minute) for minute in range(4)))
    assert report is not None
    assert [(line.line, line.text, line.kind) for line in report.lines] == [(4, "Current time: …", "clock")]
    assert report.lost_tokens == words("\n".join(RULES[3:]))
    assert (report.requests, report.changed, report.moved) == (4, 3, False)


def test_a3_a_clock_that_is_moved_leaves_the_same_text_before_and_after_the_minute() -> None:
    asked = Asked("move")
    asked.seen(*(clock(minute) for minute in range(3)))
    splits = [asked.seen(text).split for text in (clock(7), clock(8), clock(8))]
    assert [found.stays for found in splits if found] == ["\n".join(RULES)] * 3
    assert splits[0] is not None
    assert splits[0].facts == f"{FACTS_MARK}\nCurrent time: 12:07"


def test_a_text_that_does_not_change_is_not_reported() -> None:
    assert Asked().told(*[clock(1)] * 50) is None


def test_an_edited_prompt_that_is_then_stable_is_not_reported() -> None:
    edited = with_lines("Always end with a greeting.")
    assert Asked().told("\n".join(RULES), edited, *[edited] * 40, with_lines("Never end with a greeting.")) is None


def test_edits_of_different_lines_do_not_add_up() -> None:
    versions = ["\n".join(["Intro", *(f"{rule}!" for rule in RULES[:count]), *RULES[count:]]) for count in range(4)]
    assert Asked().told(*versions) is None


def test_two_applications_that_take_turns_are_not_reported() -> None:
    other = "\n".join(f"Translate line {number} of the letter with care." for number in range(20))
    assert Asked().told(*["\n".join(RULES), other] * 20) is None


def test_two_applications_that_share_most_of_their_text_and_take_turns_are_not_reported() -> None:
    assert Asked().told(*[with_lines("You sell boats."), with_lines("You repair boats.")] * 20) is None


def test_a_user_field_is_reported_without_anybodys_name() -> None:
    names = ("Ada Lovelace", "Bob Moran", "Cleo Ray", "Dora Diaz", "Evan Wu")
    report = Asked().told(*(with_lines(f"User: {name} (gold)") for name in names))
    assert report is not None
    assert [(line.text, line.kind) for line in report.lines] == [("User: … (gold)", "other")]


def test_an_applications_clock_is_found_beside_another_applications() -> None:
    asked = Asked()
    other = "\n".join(f"Translate line {number} of the letter with care." for number in range(20))
    for minute in range(5):
        asked.seen(f"{other}\nIt is 12:{minute:02d}.")
        report = asked.told(clock(minute))
    assert report is not None
    assert [line.line for line in report.lines] == [4]


def test_a_volatile_text_that_is_stable_again_is_no_longer_reported() -> None:
    asked = Asked()
    assert asked.told(*(clock(minute) for minute in range(5))) is not None
    assert asked.told(*[clock(5)] * (WINDOW + 2)) is None
    assert asked.texts.volatile == 0


def test_nothing_of_one_tenant_or_model_is_compared_with_anothers() -> None:
    asked = Asked()
    for minute in range(6):
        assert asked.seen(clock(minute), tenant=f"t{minute}").report is None
        assert asked.seen(clock(minute), model=f"m{minute}").report is None


def test_when_more_than_a_quarter_changes_it_is_reported_and_not_moved() -> None:
    asked = Asked("move")
    for number in range(8):
        observed = asked.seen("\n".join(["You help.", "Be brief.", *(f"Note {number} {at} " * 4 for at in range(4))]))
    assert observed.split is None
    assert observed.report is not None
    assert observed.report.reason is not None
    assert "at most 25%" in observed.report.reason


def test_a_changing_part_of_a_text_of_one_line_is_reported() -> None:
    report = Asked("move").told(
        *(f"You are a helpful assistant. It is 12:{minute:02d}. Answer briefly." for minute in range(5))
    )
    assert report is not None
    assert report.lines[0].text == "You are a helpful assistant. It is … Answer briefly."
    assert report.lost_tokens > 0
    assert not report.moved


def test_lines_that_come_and_go_are_one_part() -> None:
    lists = [[f"Open file: {name}.py" for name in names] for names in ("a", "bc", "", "def", "gh", "i")]
    report = Asked().told(*(with_lines(*files) for files in lists))
    assert report is not None
    assert [(line.line, line.text) for line in report.lines] == [(4, "…")]


def test_off_remembers_nothing() -> None:
    assert Asked("off").told(*(clock(minute) for minute in range(9))) is None


def test_memory_is_bounded_in_texts_and_characters() -> None:
    asked = Asked()
    for name in "abcdefghijklmnopqrstuvwxyz":
        asked.seen("\n".join(f"{name * line} " * 3 for line in range(1, 20)))
    assert asked.texts.kept == MOST_TEXTS
    chars = 20_000
    for number in range(3 * MOST_KEPT_CHARS // (MOST_TEXTS * chars)):
        for other in range(MOST_TEXTS):
            asked.seen(f"{other} {number:04d} ".ljust(chars, str(other)), tenant=str(number))
    assert MOST_TEXTS <= asked.texts.kept <= MOST_KEPT_CHARS // chars


def test_what_stands_behind_the_bound_stays_where_it_is() -> None:
    asked = Asked("move")
    tail = "\n".join(f"Line {number} of a long text." for number in range(5000))
    for minute in range(5):
        found = asked.seen(f"{clock(minute)}\n{tail}").split
    assert found is not None
    assert found.stays == "\n".join([*RULES, tail])


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        ("Time: 12:00:59", "Time: 12:01:00", "clock"),
        ("It is 9am", "It is 10am", "clock"),
        ("2026-11-29T23:59:59Z", "2026-11-30T00:00:00Z", "clock"),
        ("Today is Sunday, 29 November 2026.", "Today is Monday, 30 November 2026.", "date"),
        ("Hôm nay là ngày 29 tháng 11 năm 2026", "Hôm nay là ngày 30 tháng 11 năm 2026", "date"),
        ("오늘은 2026년 11월 29일", "오늘은 2026년 11월 30일", "date"),
        ("Session 3f2a9c1e-77aa", "Session 99ffac1e-01bb", "id"),
        ("Mail: ada@x.org", "Mail: bob@y.org", "id"),
        ("Tickets open: 41", "Tickets open: 7", "number"),
        ("User: Ada", "User: Bob", "other"),
        ("User Ada at 12:00", "User Bob at 12:01", "other"),
    ],
)
def test_what_changes_has_a_kind(one: str, other: str, kind: str) -> None:
    assert kind_of(one, other) == kind


def test_lines_are_matched_around_what_changed() -> None:
    assert matched(list("abcd"), list("axccd")) == [(0, 0), (2, 3), (3, 4)]
    assert matched(list("abcde"), list("ebca")) == [(1, 1), (2, 2)]
    assert matched([], list("ab")) == []


def test_a_block_is_moved_whole_with_the_line_that_announces_it() -> None:
    listed = ["Be brief.", "Context:", "- User: Ada", "- Time: 12:00", "  (UTC)", "", "Be kind."]
    assert split(listed, {3}).moved == ("Context:", "- User: Ada", "- Time: 12:00", "  (UTC)")
    fenced = ["Be brief.", "```json", '{"time": "12:00"}', "```", "Be kind."]
    assert split(fenced, {2}).stays == "Be brief.\nBe kind."
    json = ["Be brief.", "{", '  "user": {"name": "Ada"},', '  "time": "12:00"', "}", "Be kind."]
    assert split(json, {3}).stays == "Be brief.\nBe kind."


def test_a_sentence_that_wraps_is_moved_whole() -> None:
    wrapped = ["The user, Ada, writes to you at 12:00 from the office of the", "harbour master in the north."]
    assert split(["Be brief.", *wrapped, "Be kind."], {1}).stays == "Be brief.\nBe kind."
    assert split(["be brief", "time: 12:00", "be kind"], {1}).stays == "be brief\nbe kind"


def test_a_fence_or_bracket_that_nobody_closes_takes_nothing_along() -> None:
    assert split(["```", "Time: 12:00", "Be kind."], {1}).moved == ("Time: 12:00",)
    assert split(["{", "Time: 12:00", "Be kind."], {1}).moved == ("Time: 12:00",)


def test_a_transcript_with_another_system_text_is_left_alone() -> None:
    asked = Asked("move")
    asked.seen(*(clock(minute) for minute in range(4)))
    observed = asked.seen(clock(5))
    kept = Transcript("You are somebody else.", (), "Hello?")
    assert observed.moved_in(kept) is None
    moved = observed.moved_in(Transcript(clock(5), (), "Hello?"))
    assert moved is not None
    assert moved.facts.endswith("12:05")
