from dataclasses import dataclass, replace
from typing import cast

import pytest

from cache.residency import Residency
from cache.sent import Sent
from gateway.backends.facts import EngineFacts
from gateway.endpoints import Endpoint
from gateway.metrics import Metrics
from gateway.prefix import PrefixBreaks, Told
from gateway.replica import Replica
from prompt_builder.breaks import PrefixBreak, Story, find_break, plain_story, plan_story
from prompt_builder.builder import PromptBuilder
from prompt_builder.template import ChatTemplate
from prompt_builder.types import Dropped, Message, PastMessage, Plan, Prompt, PromptChunk, Transcript, TurnContext
from retrieval.types import RenderedChunk
from tests.support.breaking import BLOCK, Fleet
from tests.support.prompts import CHATML, ByteTokenizer

BUILDER = PromptBuilder(ByteTokenizer(), ChatTemplate(CHATML), "Answer from the passages.", BLOCK)
SYSTEM = "You are the ferry's clerk, and you are kind to dogs and to those who walk them."


def chunk(label: str) -> PromptChunk:
    text = f"[{label}] " + f"the passage of {label} goes on and on. " * 3
    ids = ByteTokenizer().encode(text)
    return PromptChunk(label, f"file-{label}", f"{label}.md", label, 1.0, text, RenderedChunk(label, text, ids))


A, B, C = chunk("aaaa"), chunk("bbbb"), chunk("cccc")


def plan(question: str, *chunks: PromptChunk, past: tuple[PastMessage, ...] = (), **changes: object) -> Plan:
    whole = Plan(SYSTEM, past, "stripped", chunks, (), "", "", question, None, ())
    return replace(whole, **changes)  # type: ignore[arg-type]


def user(text: str, *chunks: PromptChunk) -> PastMessage:
    return PastMessage("user", text, TurnContext(chunks, (), "", "") if chunks else None)


def assistant(text: str) -> PastMessage:
    return PastMessage("assistant", text)


class Clerk:
    """Sends plans to a fleet as the pipeline does."""

    def __init__(self, *names: str, capacity: int = 1000) -> None:
        self.fleet = Fleet(*names, capacity=capacity)

    def ask(
        self, wanted: Plan, *, known: int | None = None, replica: str = "one", salt: str = "", volatile: bool = False
    ) -> PrefixBreak:
        """`known`: how many past messages are recognised; all, unless it is given."""
        prompt, story = told(wanted, known, salt, volatile)
        return self.fleet.ask(prompt, story, replica=replica, salt=salt)


def told(wanted: Plan, known: int | None = None, salt: str = "", volatile: bool = False) -> tuple[Prompt, Story]:
    prompt = BUILDER.render(wanted, salt)
    recognised = len(wanted.past) if known is None else known
    transcript = Transcript(wanted.system, wanted.past, wanted.question, known=recognised)
    return prompt, plan_story(wanted, transcript, prompt, volatile_system=volatile)


def test_the_very_first_request_breaks_at_its_first_segment() -> None:
    found = Clerk().ask(plan("When?", A))
    assert (found.reason, found.kind, found.token_offset, found.cached_tokens) == ("first_request", "system", 0, 0)


def test_the_same_again_is_reused_to_its_end() -> None:
    clerk = Clerk()
    clerk.ask(plan("When?", A))
    assert clerk.ask(plan("When?", A)).reason == "end"


def test_another_question_about_the_same_chunks_breaks_at_the_question() -> None:
    clerk = Clerk()
    clerk.ask(plan("When does it sail?", A, B))
    found = clerk.ask(plan("Where does it berth?", A, B))
    assert (found.reason, found.kind) == ("new_question", "question")


def test_a_chunk_that_was_not_sent_here_before_is_named_by_its_label() -> None:
    clerk = Clerk()
    clerk.ask(plan("When?", A, B))
    found = clerk.ask(plan("When?", A, C))
    assert (found.reason, found.kind, found.label) == ("new_chunk", "chunk", "cccc")
    prompt, _ = told(plan("When?", A, C))
    before = prompt.segments[: found.segment]
    assert found.token_offset >= sum(len(segment.token_ids) for segment in before)
    assert prompt.segments[found.segment].label == "cccc"


def test_the_segment_that_differs_is_named_though_its_block_begins_in_another() -> None:
    """The block of the break holds the end of the system text, which did not change."""
    clerk = Clerk()
    for extra in range(BLOCK):
        system = SYSTEM + "!" * extra
        clerk.ask(plan("When?", A, system=system))
        assert clerk.ask(plan("When?", B, system=system)).kind == "chunk"


def test_chunks_in_another_order_break_at_the_first_that_moved() -> None:
    clerk = Clerk()
    clerk.ask(plan("When?", A, B, C))
    found = clerk.ask(plan("When?", A, C, B))
    assert (found.reason, found.label) == ("new_chunk", "cccc")


def test_a3_a_system_text_that_changes_is_named() -> None:
    clerk = Clerk()
    clerk.ask(plan("When?", A, system=f"{SYSTEM} It is 12:00:59."))
    found = clerk.ask(plan("When?", A, system=f"{SYSTEM} It is 12:01:00."))
    assert (found.reason, found.kind) == ("new_system_text", "system")
    assert found.token_offset > 0
    found = clerk.ask(plan("When?", A, system=f"{SYSTEM} It is 12:02:00."), volatile=True)
    assert found.reason == "volatile_system_text"


def test_a_conversation_that_grows_breaks_at_what_is_new() -> None:
    clerk = Clerk()
    clerk.ask(plan("When does it sail?"))
    past = (user("When does it sail?"), assistant("At nine."))
    found = clerk.ask(plan("And back?", past=past))
    assert (found.reason, found.kind) == ("new_turn", "turn")


def test_chunks_that_leave_with_their_turn_are_told_as_a_stripped_turn() -> None:
    clerk = Clerk()
    clerk.ask(plan("When does it sail?", A))
    past = (user("When does it sail?", A), assistant("At nine."))
    found = clerk.ask(plan("And back?", B, past=past))
    assert (found.reason, found.kind) == ("stripped_turn", "turn")
    clerk.ask(plan("And then?", C, past=(*past, user("And back?", B), assistant("At ten."))))
    kept = plan("When does it sail?", A, system="Other.")
    clerk.ask(kept)
    assert clerk.ask(plan("And back?", B, past=past, system="Other.", rendering="kept")).reason == "new_turn"


def test_an_edited_turn_is_told_apart_from_a_new_one() -> None:
    clerk = Clerk()
    first = (user("When does it sail?"), assistant("At nine."))
    clerk.ask(plan("When does it sail?"))
    clerk.ask(plan("And back?", past=first))
    clerk.ask(plan("Sure?", past=(*first, user("And back?"), assistant("At ten."))))
    edited = (*first, user("And the price?"), assistant("At ten."))
    found = clerk.ask(plan("Sure?", past=edited), known=2)
    assert (found.reason, found.kind) == ("edited_turn", "turn")
    answer = (user("When does it sail?"), assistant("Never."))
    assert clerk.ask(plan("And back?", past=answer), known=0).reason == "edited_turn"


def test_an_answer_that_was_generated_again_is_new_when_the_gateway_knows_it() -> None:
    clerk = Clerk()
    clerk.ask(plan("When does it sail?"))
    clerk.ask(plan("And back?", past=(user("When does it sail?"), assistant("At nine."))))
    clerk.ask(plan("When does it sail?"))
    found = clerk.ask(plan("And back?", past=(user("When does it sail?"), assistant("At half past nine."))))
    assert found.reason == "new_turn"


def test_a_history_from_elsewhere_is_new_and_not_edited() -> None:
    clerk = Clerk()
    clerk.ask(plan("When does it sail?"))
    past = (user("What is the price?"), assistant("Ten."))
    assert clerk.ask(plan("For dogs too?", past=past), known=0).reason == "new_history"


def test_turns_that_left_the_window_are_told_as_a_cut() -> None:
    clerk = Clerk()
    past = (user("When does it sail?"), assistant("At nine."), user("And back?"), assistant("At ten."))
    clerk.ask(plan("Sure?", past=past))
    wanted = plan("Sure?", past=past[2:], dropped=(Dropped("turn", "0", "It does not fit."),))
    prompt = BUILDER.render(wanted)
    story = plan_story(wanted, Transcript(SYSTEM, past, "Sure?", known=4), prompt)
    assert clerk.fleet.ask(prompt, story).reason == "cut_history"


def test_a_fold_is_told_as_one() -> None:
    clerk = Clerk()
    past = (user("When does it sail?"), assistant("At nine."), user("And back?"), assistant("At ten."))
    clerk.ask(plan("Sure?", past=past))
    found = clerk.ask(plan("Sure?", past=past[2:], summary="It sails at nine.", folded=2))
    assert (found.reason, found.kind) == ("fold", "summary")


def test_what_was_evicted_is_not_told_as_new() -> None:
    clerk = Clerk(capacity=40)
    clerk.ask(plan("When?", A))
    clerk.ask(plan("When?", B, C, system="Another system text that has nothing in common with the other one." * 5))
    found = clerk.ask(plan("When?", A))
    # The gateway's instructions begin both prompts.
    assert (found.reason, found.cached_tokens, found.token_offset) == ("evicted", 32, 32)


def test_g3_what_a_restart_took_is_told_as_that_until_it_is_there_again() -> None:
    clerk = Clerk()
    clerk.ask(plan("When?", A))
    clerk.fleet.restart()
    assert clerk.ask(plan("When?", A)).reason == "restarted"
    assert clerk.ask(plan("When?", A)).reason == "end"
    assert clerk.ask(plan("When?", B)).reason == "new_chunk"


def test_what_another_replica_holds_is_told_as_that() -> None:
    clerk = Clerk("one", "two")
    clerk.ask(plan("When?", A))
    assert clerk.ask(plan("When?", A), replica="two").reason == "other_replica"
    clerk.ask(plan("When?", A, B))
    found = clerk.ask(plan("When?", A, B), replica="two")
    assert (found.reason, found.cached_tokens > 0) == ("other_replica", True)
    assert clerk.ask(plan("When?", A, C), replica="two").reason == "new_chunk"
    clerk.fleet.sent.forget("one")
    clerk.ask(plan("When?", C, A))
    assert clerk.ask(plan("When?", C, B), replica="two").reason == "other_replica"


def test_f5_another_tenants_prompt_shows_in_nothing_but_the_operators_flag() -> None:
    shared, alone = Clerk(), Clerk()
    shared.ask(plan("When?", A, B), salt="aa")
    wanted = [plan("When?", A, C), plan("When?", A, B), plan("Where?", A, B), plan("Where?", B, A)]
    seen = [shared.ask(each, salt="bb") for each in wanted]
    unseen = [alone.ask(each, salt="bb") for each in wanted]
    assert [replace(each, other_tenant=False) for each in seen] == unseen
    assert [each.other_tenant for each in seen] == [True, True, False, False]
    assert [each.reason for each in seen] == ["first_request", "new_chunk", "new_question", "new_chunk"]
    assert not any(each.other_tenant for each in unseen)


class TwoGateways:
    """In front of one replica; what one sends the other is told, block by block."""

    def __init__(self, capacity: int = 1000) -> None:
        self.ours, self.theirs = Clerk(capacity=capacity), Clerk(capacity=capacity)
        self.theirs.fleet.caches = self.ours.fleet.caches

    def they_ask(self, wanted: Plan) -> None:
        self.theirs.ask(wanted)
        self.ours.fleet.sent.record_foreign("one", 0, told(wanted)[0].block_hashes)


def test_what_another_gateway_sent_is_not_told_as_new() -> None:
    gateways = TwoGateways()
    gateways.ours.ask(plan("When?", C))
    gateways.they_ask(plan("When does it sail?", A, B))
    found = gateways.ours.ask(plan("Where does it berth?", A, B))
    assert found.cached_tokens > 0
    assert found.reason in ("unknown", "new_question")
    assert gateways.ours.ask(plan("And back, on a Sunday?", A, B)).reason == "new_question"
    assert gateways.ours.ask(plan("And back, on a Sunday?", A, C)).reason == "new_chunk"


def test_what_another_gateway_sent_and_the_engine_evicted_is_told_as_evicted() -> None:
    gateways = TwoGateways(capacity=40)
    gateways.ours.ask(plan("When?", C, system="Short."))
    gateways.they_ask(plan("When?", A, B, system="Short."))
    gateways.ours.ask(plan("When?", B, C, system="Another system text with nothing in common with it." * 8))
    assert gateways.ours.ask(plan("When?", A, B, system="Short.")).reason == "evicted"


def test_a_first_request_is_one_whose_tenant_sent_nothing_through_any_gateway() -> None:
    gateways = TwoGateways()
    gateways.they_ask(plan("When?", A, B))
    assert gateways.ours.ask(plan("Where?", A, C)).reason == "unknown"


def test_a_tenants_own_prompts_are_no_other_tenants() -> None:
    clerk = Clerk(capacity=30)
    for question in ("When?", "Where?", "Why?"):
        for chunks in ((A, B), (B, A), (C, A)):
            assert not clerk.ask(plan(question, *chunks), salt="aa").other_tenant


def test_a_prompt_under_way_at_the_same_time_makes_the_reason_unknown() -> None:
    clerk = Clerk()
    clerk.ask(plan("When?", B))
    prompt, story = told(plan("When?", A))
    since = clerk.fleet.sent.now()
    clerk.fleet.ask(prompt, story)
    assert clerk.fleet.answered(prompt, story, 16, since).reason == "unknown"


def test_where_what_was_sent_says_nothing_of_what_is_held_the_reason_is_unknown() -> None:
    prompt, story = told(plan("When?", A))
    found = find_break(prompt, story, 32, BLOCK, "", None)
    assert found is not None
    assert (found.reason, found.token_offset) == ("unknown", 32)


@pytest.mark.parametrize("cached", [-1, 10_000])
def test_impossible_counts_and_prompts_without_ids_have_no_break(cached: int) -> None:
    prompt, story = told(plan("When?", A))
    assert find_break(prompt, story, cached, BLOCK, "", None) is None
    assert find_break(prompt, story, 0, 0, "", None) is None
    assert find_break(replace(prompt, token_ids=None), story, 0, BLOCK, "", None) is None
    assert find_break(prompt, story, 0, BLOCK // 2, "", None) is None
    # As many blocks, but of another salt: they name other places.
    assert find_break(prompt, story, 32, BLOCK, "another", None) is None


def test_messages_that_pass_through_are_told_by_their_roles() -> None:
    fleet = Fleet()

    def ask(*messages: tuple[str, str]) -> PrefixBreak:
        prompt = BUILDER.passthrough([Message(role, text) for role, text in messages])  # type: ignore[arg-type]
        return fleet.ask(prompt, plain_story(prompt))

    assert ask(("system", SYSTEM), ("user", "When does it sail?")).reason == "first_request"
    found = ask(("system", SYSTEM), ("user", "What is the price?"))
    assert (found.reason, found.kind) == ("new_question", "question")
    found = ask(("system", "Something else entirely, and long enough."), ("user", "What is the price?"))
    assert (found.reason, found.kind) == ("new_system_text", "system")
    grown = [("system", SYSTEM), ("user", "When does it sail?"), ("assistant", "At nine."), ("user", "And back?")]
    assert ask(*grown).reason == "new_turn"


def test_memory_is_bounded_and_shared_among_replicas() -> None:
    sent = Sent(most_blocks=1000, most_places=100)
    for number in range(300):
        replica = f"replica-{number % 4}"
        sent.record(replica, 0, [f"{number}-{block}".encode() for block in range(20)], (), b"")
        assert len(sent) <= 1000 + 4 * 20
    assert sent.view("replica-3", 0, sent.now(), b"").block(b"299-0") == "held"
    assert sent.view("replica-3", 0, sent.now(), b"").block(b"3-0") is None


def test_more_replicas_than_may_be_are_forgotten() -> None:
    sent = Sent()
    for number in range(600):
        sent.record(f"replica-{number}", 0, [b"%d" % number], (), b"")
    assert len(sent) <= 256


ENGINE = EngineFacts(reachable=True, model="m", block_size=BLOCK)


@dataclass(eq=False)
class Engine:
    """What is asked of a replica."""

    endpoint: Endpoint
    facts: EngineFacts = ENGINE
    residency: Residency | None = None
    several_engines: bool = False


def test_a_name_that_moved_to_another_address_is_remembered_when_the_old_engine_goes() -> None:
    breaks = PrefixBreaks(Metrics())
    old, new = (cast(Replica, Engine(Endpoint("main", url))) for url in ("http://one", "http://two"))
    prompt, story = told(plan("When?", A))
    for engine in (old, new):
        breaks.computed(engine, Told(prompt, story, ""), 0, None)
    breaks.forget(old)
    found = breaks.foretold(new, Told(prompt, story, ""), 0)
    assert found is not None
    assert found.found.reason == "evicted"
