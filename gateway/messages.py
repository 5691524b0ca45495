"""A client's messages as a conversation: what can be rendered token-exact, and what must stay as it came."""

from dataclasses import dataclass, replace
from typing import Any

import orjson

from gateway.wire import ChatMessage, ChatRequest
from prompt_builder.types import Message, PastMessage, Role, Tokenizer, Transcript

_SYSTEM_ROLES = ("system", "developer")
_TEMPLATE_TOKENS_PER_MESSAGE = 8
_EMPTY = Transcript("", (), "")


@dataclass(frozen=True, slots=True)
class Conversation:
    """`messages` ends with the question.

    A conversation is plain when every message is a role and text and nothing follows the question. Otherwise
    `messages` holds the system texts and the question alone, and `others` what stands around it, untouched: the
    earlier messages and those after the question (tool calls and their results).
    """

    messages: tuple[Message, ...]
    new: tuple[Message, ...]
    plain: bool
    inexact_reason: str | None
    before: tuple[dict[str, Any], ...] = ()
    after_question: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    transcript: Transcript = _EMPTY

    def continuing(self, earlier: tuple[Message, ...]) -> "Conversation":
        """This request's messages behind those of a kept conversation; a history that is sent again counts once."""
        if not earlier:
            return self
        if self.messages[: len(earlier)] == earlier:
            return replace(self, new=self.messages[len(earlier) :])
        system = tuple(message for message in self.messages if message.role in _SYSTEM_ROLES)
        new = tuple(message for message in self.messages if message.role not in _SYSTEM_ROLES)
        if system:
            earlier = tuple(message for message in earlier if message.role not in _SYSTEM_ROLES)
        return replace(self, messages=(*system, *earlier, *new), new=new)

    def with_transcript(self, transcript: Transcript) -> "Conversation":
        return replace(self, transcript=transcript)

    def extra_tokens(self, tokenizer: Tokenizer) -> int:
        """Tokens of what the planner does not see, counted as JSON: an upper estimate."""
        extra = (*self.before, *self.after_question, *self.tools)
        return sum(tokenizer.count(orjson.dumps(item).decode()) + _TEMPLATE_TOKENS_PER_MESSAGE for item in extra)


def read_conversation(request: ChatRequest) -> Conversation | None:
    """None when there is no user message with text, and so no question to search for."""
    last_user = max((i for i, message in enumerate(request.messages) if message.role == "user"), default=None)
    if last_user is None or not request.messages[last_user].text.strip():
        return None
    reason = _inexact_reason(request, last_user)
    if reason is None:
        messages = tuple(_message(message) for message in request.messages)
        return Conversation(messages, messages, True, None)
    raw = [message.model_dump(exclude_unset=True) for message in request.messages]
    before = request.messages[:last_user]
    system = [message for message in before if message.role in _SYSTEM_ROLES]
    question = request.messages[last_user]
    asked = (*(_message(message) for message in system), Message("user", question.text))
    return Conversation(
        messages=asked,
        new=asked,
        plain=False,
        inexact_reason=reason,
        before=tuple(raw[i] for i, message in enumerate(before) if message.role not in _SYSTEM_ROLES),
        after_question=tuple(raw[last_user + 1 :]),
        tools=tuple(request.tools or ()),
    )


def splice(conversation: Conversation, rendered: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rendered system message, the client's own messages around the question, the rendered question."""
    system, question = rendered[:-1], rendered[-1]
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


def _inexact_reason(request: ChatRequest, last_user: int) -> str | None:
    if request.tools:
        return "the request offers tools"
    if last_user != len(request.messages) - 1:
        return "messages follow the last user message"
    if not all(message.plain for message in request.messages):
        return "a message holds more than text"
    return None


def _message(message: ChatMessage) -> Message:
    role: Role = message.role if message.role != "function" else "tool"
    return Message(role, message.text)
