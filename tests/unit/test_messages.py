from typing import Any

import pytest

from gateway.messages import Conversation, read_conversation, splice
from gateway.wire import ChatRequest
from prompt_builder.tokenizer import EstimateTokenizer
from prompt_builder.types import Message

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 400_000}}


def said(*pairs: tuple[str, Any], **extra: Any) -> ChatRequest:
    messages = [{"role": role, "content": content} for role, content in pairs]
    return ChatRequest.model_validate({"model": "m", "messages": messages, **extra})


def read(*pairs: tuple[str, Any], **extra: Any) -> Conversation:
    conversation = read_conversation(said(*pairs, **extra))
    assert conversation is not None
    return conversation


def contents(conversation: Conversation) -> list[str]:
    return [message.content for message in conversation.messages]


@pytest.mark.parametrize("content", ["", "  ", "\n\u3000", None, [], [PICTURE], [{"type": "text", "text": " "}]])
def test_a_last_user_message_without_text_is_no_question(content: Any) -> None:
    assert read_conversation(said(("user", "earlier"), ("assistant", "a"), ("user", content))) is None


def test_messages_without_a_user_are_no_question() -> None:
    assert read_conversation(said(("system", "s"), ("assistant", "a"))) is None


def test_plain_messages_are_a_plain_conversation() -> None:
    conversation = read(("developer", "d"), ("user", [{"type": "text", "text": "q"}]))
    assert conversation.plain
    assert conversation.inexact_reason is None
    assert conversation.messages == (Message("developer", "d"), Message("user", "q"))
    assert conversation.extra_tokens(EstimateTokenizer()) == 0


@pytest.mark.parametrize(
    ("extra", "reason", "plain"),
    [
        ({"tools": [{"type": "function"}]}, "offers tools", False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "arguments for the chat template", True),
        ({"reasoning_effort": "low"}, "arguments for the chat template", True),
        ({"reasoning_effort": None, "tools": []}, None, True),
    ],
)
def test_what_shapes_the_prompt_beyond_messages_makes_it_inexact(
    extra: dict[str, Any], reason: str | None, plain: bool
) -> None:
    conversation = read(("user", "q"), **extra)
    assert conversation.plain is plain
    assert (reason is None) == (conversation.inexact_reason is None)
    assert reason is None or reason in str(conversation.inexact_reason)


def test_names_count_only_where_the_template_reads_them() -> None:
    request = ChatRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "q", "name": "ann"}]}
    )
    ignored = read_conversation(request)
    heeded = read_conversation(request, template_reads_names=True)
    assert ignored is not None
    assert heeded is not None
    assert ignored.plain
    assert not heeded.plain
    assert "names" in str(heeded.inexact_reason)


def test_what_is_not_plain_stands_around_the_rendered_question_untouched() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}
    result = {"role": "tool", "tool_call_id": "c", "content": "6"}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "earlier"},
        {"role": "assistant", "content": "yes", "name": "bot"},
        {"role": "user", "content": [{"type": "text", "text": "q"}, PICTURE]},
        call,
        result,
    ]
    conversation = read_conversation(ChatRequest.model_validate({"model": "m", "messages": messages}))
    assert conversation is not None
    assert not conversation.plain
    assert contents(conversation) == ["s", "q"]
    rendered = [{"role": "system", "content": "S"}, {"role": "user", "content": "chunks and q"}]
    assert splice(conversation, rendered) == [
        {"role": "system", "content": "S"},
        messages[1],
        messages[2],
        {"role": "user", "content": [{"type": "text", "text": "chunks and q"}, PICTURE]},
        call,
        result,
    ]


def test_a_pictures_bytes_are_not_counted_as_text() -> None:
    question = read(("user", [{"type": "text", "text": "q"}, PICTURE]))
    earlier = read(("user", [{"type": "text", "text": "a"}, PICTURE]), ("assistant", "b"), ("user", "q"))
    for conversation in (question, earlier):
        assert 1_000 < conversation.extra_tokens(EstimateTokenizer()) < 1_200
    wordy = read(("user", [{"type": "text", "text": "word " * 1_000}, PICTURE]), ("assistant", "b"), ("user", "q"))
    assert wordy.extra_tokens(EstimateTokenizer()) > 2_000


def test_tools_are_counted() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "word " * 500}}
    assert read(("user", "q"), tools=[tool]).extra_tokens(EstimateTokenizer()) > 500


EARLIER = (Message("system", "s"), Message("user", "q1"), Message("assistant", "a1"))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ([("user", "q2")], ["s", "q1", "a1", "q2"]),
        ([("user", "q2"), ("user", "q3")], ["s", "q1", "a1", "q2", "q3"]),
        ([("system", "t"), ("user", "q2")], ["t", "q1", "a1", "q2"]),
        ([("user", "q1"), ("assistant", "a1"), ("user", "q2")], ["s", "q1", "a1", "q2"]),
        ([("system", "t"), ("user", "q1"), ("assistant", "a1"), ("user", "q2")], ["t", "q1", "a1", "q2"]),
        ([("user", "q1"), ("assistant", "edited"), ("user", "q2")], ["s", "q1", "edited", "q2"]),
        ([("user", "q1 edited")], ["s", "q1", "a1", "q1 edited"]),
    ],
)
def test_a_named_conversation_goes_on_or_is_stated_anew(asked: list[tuple[str, Any]], expected: list[str]) -> None:
    assert contents(read(*asked).continuing(EARLIER)) == expected


def test_a_named_conversation_begins_with_what_is_asked() -> None:
    assert contents(read(("system", "s"), ("user", "q")).continuing(())) == ["s", "q"]
