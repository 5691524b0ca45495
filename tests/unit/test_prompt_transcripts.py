from dataclasses import replace

import pytest

from cache.memory import MemoryStore
from prompt_builder.stored import CorruptValue, decode_fold, decode_messages, decode_turn
from prompt_builder.transcripts import CUT_SHARE, MAX_CONVERSATION_MESSAGES, NoQuestion, Transcripts, without_files
from prompt_builder.types import Message, Plan, PromptChunk, Transcript, TurnContext
from retrieval.types import RenderedChunk


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def chunk(name: str, label: str = "k7f2a") -> PromptChunk:
    text = f"[{label}] {name}\nBody of {name}.\n\n"
    return PromptChunk(
        label, f"id-{name}", name, "Title", 0.75, f"Body of {name}.", RenderedChunk(label, text, (1, 2))
    )


def plan_with(*chunks: PromptChunk, references: tuple[PromptChunk, ...] = ()) -> Plan:
    return Plan("", (), "kept", chunks, references, "evidence", "facts", "q", None, ())


def said(*contents: str) -> list[Message]:
    """Alternating user and assistant messages."""
    return [Message("user" if place % 2 == 0 else "assistant", text) for place, text in enumerate(contents)]


def transcripts(clock: Clock | None = None, ttl_s: float = 100.0) -> Transcripts:
    clock = clock or Clock()
    return Transcripts(MemoryStore(2**20, now=clock), ttl_s, now=clock)


async def told(
    memory: Transcripts, *contents: str, user: str | None = "u", tenant: str = "t", model: str = "m"
) -> None:
    """Records each answered question of a conversation, with a chunk named after its question."""
    for place in range(1, len(contents), 2):
        transcript = await memory.resume(tenant, user, model, said(*contents[:place]))
        await memory.record(tenant, user, model, transcript, plan_with(chunk(contents[place - 1])), contents[place])


def contexts(transcript: Transcript) -> list[str | None]:
    """Per past user message the name of its chunk."""
    return [
        message.context.chunks[0].filename if message.context else None
        for message in transcript.past
        if message.role == "user"
    ]


async def test_a_resent_history_gets_back_what_it_was_sent_with() -> None:
    memory = transcripts()
    await told(memory, "q1", "a1", "q2", "a2")
    resumed = await memory.resume("t", "u", "m", said("q1", "a1", "q2", "a2", "q3"))
    assert contexts(resumed) == ["q1", "q2"]
    assert resumed.known == 4
    assert resumed.question == "q3"
    context = resumed.past[0].context
    assert context == TurnContext(
        (replace(chunk("q1"), rendered=RenderedChunk("k7f2a", chunk("q1").rendered.text, ())),),
        (),
        "evidence",
        "facts",
    )


async def test_a8_leading_system_and_developer_messages_join_unchanged() -> None:
    messages = [Message("system", " one "), Message("developer", "two\n"), *said("q1", "a1", "q2")]
    resumed = await transcripts().resume("t", "u", "m", messages)
    assert resumed.system == " one \n\ntwo\n"
    assert [message.content for message in resumed.past] == ["q1", "a1"]


async def test_a3_a_system_text_that_changes_does_not_hide_the_history() -> None:
    memory = transcripts()
    await told(memory, "q1", "a1")
    later = [Message("system", "It is 12:01:00."), *said("q1", "a1", "q2")]
    assert (await memory.resume("t", "u", "m", later)).known == 2


async def test_an_unknown_history_is_accepted_as_it_stands() -> None:
    resumed = await transcripts().resume("t", "u", "m", said("x", "y", "z"))
    assert (resumed.known, contexts(resumed), resumed.question) == (0, [None], "z")


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        (["q1", "a1 edited", "q2", "a2", "q3"], [None, None]),
        (["q1", "a1", "q2 edited", "a2", "q3"], ["q1", None]),
        (["q1", "a1", "q2", "a2 again", "q3"], ["q1", None]),
        (["q1", " a1\n", "q2", "a2", "q3"], ["q1", "q2"]),
        (["q2", "a2", "q3"], [None]),
    ],
)
async def test_an_edited_or_regenerated_turn_branches(history: list[str], expected: list[str | None]) -> None:
    memory = transcripts()
    await told(memory, "q1", "a1", "q2", "a2")
    assert contexts(await memory.resume("t", "u", "m", said(*history))) == expected


async def test_both_branches_of_a_regenerated_answer_are_known() -> None:
    memory = transcripts()
    await told(memory, "q1", "a1")
    await told(memory, "q1", "a1 again")
    for answer in ("a1", "a1 again"):
        assert (await memory.resume("t", "u", "m", said("q1", answer, "q2"))).known == 2


@pytest.mark.parametrize(
    "other", [("t2", "u", "m"), ("t", "u2", "m"), ("t", None, "m"), ("t", "", "m"), ("t", "u", "m2")]
)
async def test_f4_other_tenants_users_and_models_share_nothing(other: tuple[str, str | None, str]) -> None:
    memory = transcripts()
    await told(memory, "q1", "a1")
    tenant, user, model = other
    assert (await memory.resume(tenant, user, model, said("q1", "a1", "q2"))).known == 0


async def test_role_and_content_do_not_run_into_each_other() -> None:
    memory = transcripts()
    await told(memory, "q1", "a1", tenant="ab", user="c")
    assert (await memory.resume("a", "bc", "m", said("q1", "a1", "q2"))).known == 0


@pytest.mark.parametrize("messages", [[], [Message("system", "s")], said("q1", "a1")])
async def test_messages_that_do_not_end_with_a_user_are_refused(messages: list[Message]) -> None:
    with pytest.raises(NoQuestion):
        await transcripts().resume("t", "u", "m", messages)


async def test_reading_a_turn_renews_it_and_an_unread_one_leaves() -> None:
    clock = Clock()
    memory = transcripts(clock, ttl_s=100.0)
    await told(memory, "q1", "a1")
    for _ in range(5):
        clock.now_s += 60
        assert (await memory.resume("t", "u", "m", said("q1", "a1", "q2"))).known == 2
    clock.now_s += 101
    assert (await memory.resume("t", "u", "m", said("q1", "a1", "q2"))).known == 0


async def test_a_corrupt_value_is_a_miss_that_is_counted() -> None:
    store = MemoryStore(2**20)
    written: list[str] = []

    class Remembering:
        async def put(self, key: str, value: bytes, ttl_s: float) -> None:
            written.append(key)
            await store.put(key, value, ttl_s)

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

    memory = Transcripts(Remembering(), 100.0)  # type: ignore[arg-type]
    await told(memory, "q1", "a1")
    await memory.keep("t", "u", "c", said("q1", "a1"))
    for key in written:
        await store.put(key, b'[1,"half', 100.0)
    assert (await memory.resume("t", "u", "m", said("q1", "a1", "q2"))).known == 0
    assert await memory.load("t", "u", "c") == []
    assert memory.counts.corrupt == 2


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'[1,0,[],[],"",""]',
        b'[2,0,[["a"]],[],"","",0]',
        b'[2,0,[],[1],"","",0]',
        b'[2,0,[],[],"","",-1]',
        b'[1,0,true,"s",[]]',
        b'[1,0,2,"",[]]',
        b'[1,0,2,"s","ab"]',
        b"\xff",
    ],
)
def test_bytes_of_another_kind_are_corrupt(raw: bytes) -> None:
    with pytest.raises(CorruptValue):
        decode_turn(raw)
    with pytest.raises(CorruptValue):
        decode_fold(raw)
    with pytest.raises(CorruptValue):
        decode_messages(raw)


async def test_a_named_conversation_is_what_was_kept_last_and_belongs_to_its_tenant_and_user() -> None:
    memory = transcripts()
    assert await memory.load("t", "u", "c/1\x00ü") == []
    await memory.keep("t", "u", "c/1\x00ü", said("q1", "a1"))
    await memory.keep("t", "u", "c/1\x00ü", said("q1", "a1", "q2", "a2"))
    assert await memory.load("t", "u", "c/1\x00ü") == said("q1", "a1", "q2", "a2")
    for tenant, user in (("t2", "u"), ("t", "u2"), ("t", None), ("t", "")):
        assert await memory.load(tenant, user, "c/1\x00ü") == []


async def test_a_named_conversation_is_bounded_and_still_begins_with_system_text_and_a_question() -> None:
    memory = Transcripts(MemoryStore(2**24), 100.0)
    system = [Message("system", "Be brief."), Message("developer", "And kind.")]
    many = [message for place in range(MAX_CONVERSATION_MESSAGES) for message in said(f"q{place}", "a")]
    most = MAX_CONVERSATION_MESSAGES - len(system)
    await memory.keep("t", None, "many", [*system, *many[:most]])
    assert await memory.load("t", None, "many") == [*system, *many[:most]]
    await memory.keep("t", None, "many", [*system, *many])
    left = int(MAX_CONVERSATION_MESSAGES * CUT_SHARE) - len(system)
    assert await memory.load("t", None, "many") == [*system, *many[-left:]]
    large = [message for place in range(5) for message in said(f"q{place}", "a" * 300_000)]
    await memory.keep("t", None, "large", [*system, *large])
    assert await memory.load("t", None, "large") == [*system, *large[-4:]]


async def test_a_named_conversation_is_cut_rarely_and_deeply() -> None:
    memory = Transcripts(MemoryStore(2**24), 100.0)
    fronts = []
    for turn in range(1200):
        history = [*await memory.load("t", None, "long"), *said(f"q{turn}", "a")]
        fronts.append(history[0].content)
        await memory.keep("t", None, "long", history)
    assert len(set(fronts)) <= 1 + 1200 * 2 / (MAX_CONVERSATION_MESSAGES * (1 - CUT_SHARE))


async def test_e6_turns_with_text_of_a_deleted_file_stand_without_it() -> None:
    memory = transcripts()
    await told(memory, "q1", "a1", "q2", "a2")
    resumed = await memory.resume("t", "u", "m", said("q1", "a1", "q2", "a2", "q3"))
    assert contexts(without_files(resumed, lambda file_id: file_id != "id-q1")) == [None, "q2"]
    assert without_files(resumed, lambda file_id: True) == resumed


async def test_e6_a_turn_that_only_refers_to_a_deleted_chunk_loses_its_evidence_too() -> None:
    memory = transcripts()
    await told(memory, "q1", "a1")
    second = await memory.resume("t", "u", "m", said("q1", "a1", "q2"))
    await memory.record("t", "u", "m", second, plan_with(references=(chunk("q1"),)), "a2")
    resumed = await memory.resume("t", "u", "m", said("q1", "a1", "q2", "a2", "q3"))
    assert resumed.past[2].context is not None
    gone = without_files(resumed, lambda file_id: file_id != "id-q1")
    assert all(message.context is None for message in gone.past)
    assert without_files(resumed, lambda file_id: True) == resumed
