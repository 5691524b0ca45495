"""A client's messages as a conversation: what can be rendered token-exact, and what must stay as it came."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gateway.wire import TEMPLATE_FIELDS, ChatMessage, ChatRequest, is_text, to_json
from prompt_builder.types import Message, PastMessage, Role, Tokenizer, Transcript

_SYSTEM_ROLES = ("system", "developer")
_TEMPLATE_TOKENS_PER_MESSAGE = 8
_PICTURE_TOKENS = 1024
"""A part that is not text counts as this many: its bytes say nothing about its tokens."""
_EMPTY = Transcript("", (), "")


@dataclass(frozen=True, slots=True)
class Conversation:
    """`messages` ends with the question.

    A conversation is plain when every message is a role and text and nothing follows the question. Otherwise
    `messages` holds the system texts and the question's text alone; `before` and `after_question` hold what stands
    around it and `question_parts` what the question holds beside its text, untouched.
    """

    messages: tuple[Message, ...]
    plain: bool
    inexact_reason: str | None
    before: tuple[dict[str, Any], ...] = ()
    question_parts: tuple[dict[str, Any], ...] = ()
    after_question: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    transcript: Transcript = _EMPTY

    def continuing(self, earlier: tuple[Message, ...]) -> "Conversation":
        """This request's messages behind those of a kept conversation.

        A request that holds answers states its history itself, as it wants it: an edited or regenerated turn
        branches. A system text that it states replaces the kept one.
        """
        system, new = _apart(self.messages)
        kept_system, kept = _apart(earlier)
        if any(message.role == "assistant" for message in new):
            kept = ()
        return replace(self, messages=(*(system or kept_system), *kept, *new))

    def with_transcript(self, transcript: Transcript) -> "Conversation":
        return replace(self, transcript=transcript)

    def extra_tokens(self, tokenizer: Tokenizer) -> int:
        """Tokens of what the planner does not see, counted as JSON: an upper estimate, but for pictures."""
        extra = (*self.before, *self.after_question, *self.tools)
        counted = sum(_stated_tokens(item, tokenizer) + _TEMPLATE_TOKENS_PER_MESSAGE for item in extra)
        return counted + _PICTURE_TOKENS * len(self.question_parts)


def read_conversation(request: ChatRequest, *, template_reads_names: bool = False) -> Conversation | None:
    """None when the last user message has no text, and so there is no question to search for."""
    last_user = max((i for i, message in enumerate(request.messages) if message.role == "user"), default=None)
    if last_user is None or not request.messages[last_user].text.strip():
        return None
    reason = _inexact_reason(request, last_user, template_reads_names)
    if reason is None:
        extra = request.model_extra or {}
        if any(extra.get(name) is not None for name in TEMPLATE_FIELDS):
            reason = "the request has arguments for the chat template"
        return Conversation(tuple(_message(message) for message in request.messages), True, reason)
    raw = [message.model_dump(exclude_unset=True) for message in request.messages]
    before = request.messages[:last_user]
    system = [message for message in before if message.role in _SYSTEM_ROLES]
    question = request.messages[last_user]
    asked = (*(_message(message) for message in system), Message("user", question.text))
    return Conversation(
        messages=asked,
        plain=False,
        inexact_reason=reason,
        before=tuple(raw[i] for i, message in enumerate(before) if message.role not in _SYSTEM_ROLES),
        question_parts=_parts_beside_text(question),
        after_question=tuple(raw[last_user + 1 :]),
        tools=tuple(request.tools or ()),
    )


def splice(conversation: Conversation, rendered: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rendered system message, the client's own messages around the question, the rendered question."""
    system, question = rendered[:-1], rendered[-1]
    if conversation.question_parts:
        text = {"type": "text", "text": question["content"]}
        question = {**question, "content": [text, *conversation.question_parts]}
    return [*system, *conversation.before, question, *conversation.after_question]


def plain_transcript(conversation: Conversation) -> Transcript:
    """The transcript of a conversation that is not looked up."""
    system = "\n\n".join(message.content for message in conversation.messages if message.role in _SYSTEM_ROLES)
    past = tuple(
        PastMessage(message.role, message.content)
        for message in conversation.messages[:-1]
        if message.role not in _SYSTEM_ROLES
    )
    return Transcript(system, past, conversation.messages[-1].content)


def _inexact_reason(request: ChatRequest, last_user: int, template_reads_names: bool) -> str | None:
    if request.tools:
        return "the request offers tools"
    if template_reads_names and any((message.model_extra or {}).get("name") for message in request.messages):
        return "the chat template reads the names of messages"
    if last_user != len(request.messages) - 1:
        return "messages follow the last user message"
    if not all(message.plain for message in request.messages):
        return "a message holds more than text"
    return None


def _message(message: ChatMessage) -> Message:
    role: Role = message.role if message.role != "function" else "tool"
    return Message(role, message.text)


def _apart(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Leading system texts, and the rest."""
    first = next(
        (place for place, message in enumerate(messages) if message.role not in _SYSTEM_ROLES), len(messages)
    )
    return messages[:first], messages[first:]


def _parts_beside_text(message: ChatMessage) -> tuple[dict[str, Any], ...]:
    if not isinstance(message.content, list):
        return ()
    return tuple(part for part in message.content if not is_text(part))


def _stated_tokens(item: Mapping[str, Any], tokenizer: Tokenizer) -> int:
    content = item.get("content")
    if not isinstance(content, list):
        return tokenizer.count(to_json(item).decode())
    texts = [part for part in content if is_text(part)]
    counted = tokenizer.count(to_json({**item, "content": texts}).decode())
    return counted + _PICTURE_TOKENS * (len(content) - len(texts))
