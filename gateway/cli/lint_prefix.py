"""What logged requests could have reused of the ones before them, and what kept them from it."""

from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.cli.lint_log import LoggedRequest
from gateway.volatile import Observed, SystemTexts, VolatileText
from prompt_builder.volatile import common_prefix

BreakKind = Literal[
    "system_changed", "tools_order", "tools_changed", "first_message", "history_edited", "history_shortened"
]

CURES: dict[BreakKind, str] = {
    "system_changed": "Send one conversation's system text as it was; put what changes into the last user message.",
    "tools_order": "Send the tools in one order, sorted by name for instance.",
    "tools_changed": "Offer the same tools throughout a conversation; tool_choice says which may be called.",
    "first_message": "The conversation's first message was rewritten: send it as it was.",
    "history_edited": "A past message was rewritten: resend the history as it was sent and answered.",
    "history_shortened": "Old messages were dropped: drop rarely and many at a time, or let the gateway fold them.",
}
VOLATILE_CURE = "Put the lines that change behind the stable text, or set HEADSTART_VOLATILE=move."

MOST_MESSAGES = 1_000_000
"""Messages, as digests, of the requests that a later one may go on from; the oldest requests leave."""

REQUEST_OVERHEAD = 8
"""What a remembered request takes beside its messages, in messages."""

MOST_TEXT_CHARS = 16 * 2**20
MOST_ALIKE = 4
MOST_TEXTS_TOLD = 1000
EXAMPLES = 3


@dataclass(slots=True)
class Break:
    """All breaks of one kind. `lines` are the first EXAMPLES of them."""

    requests: int = 0
    lost_tokens: int = 0
    lines: list[int] = field(default_factory=list)

    def add(self, line: int, lost_tokens: int) -> None:
        self.requests += 1
        self.lost_tokens += lost_tokens
        if len(self.lines) < EXAMPLES:
            self.lines.append(line)


@dataclass(slots=True)
class Volatile:
    """One volatile system text. `requests` were sent while it was known to change; `line` is the first of them."""

    model: str
    line: int
    report: VolatileText
    requests: int = 0
    lost_tokens: int = 0


@dataclass(slots=True)
class Findings:
    """`reusable_tokens`: of all prompts, what a request before had computed; `reused_tokens`: what as sent can be."""

    requests: int = 0
    prompt_tokens: int = 0
    reusable_tokens: int = 0
    reused_tokens: int = 0
    volatile: dict[int, Volatile] = field(default_factory=dict)
    breaks: dict[BreakKind, Break] = field(default_factory=dict)

    @property
    def any(self) -> bool:
        return bool(self.volatile or self.breaks)

    def wire(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "reusable_tokens": self.reusable_tokens,
            "reused_tokens": self.reused_tokens,
            "volatile": [
                {
                    "model": found.model,
                    "first_line": found.line,
                    "requests": found.requests,
                    "lost_tokens": found.lost_tokens,
                    "lines": found.report.wire()["lines"],
                    "cure": VOLATILE_CURE,
                }
                for found in self.volatile_by_loss()
            ],
            "breaks": [
                {
                    "kind": kind,
                    "requests": found.requests,
                    "lost_tokens": found.lost_tokens,
                    "lines": found.lines,
                    "cure": CURES[kind],
                }
                for kind, found in self.breaks_by_loss()
            ],
        }

    def volatile_by_loss(self) -> list[Volatile]:
        return sorted(self.volatile.values(), key=lambda found: -found.lost_tokens)

    def breaks_by_loss(self) -> list[tuple[BreakKind, Break]]:
        return sorted(self.breaks.items(), key=lambda item: -item[1].lost_tokens)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A request as a later one may go on from it; `tokens` are its messages'. Texts are digests."""

    system: int
    system_tokens: int
    tools: tuple[int, ...]
    tools_tokens: int
    messages: "array[int]"
    tokens: "array[int]"

    @property
    def held(self) -> int:
        return len(self.messages) + REQUEST_OVERHEAD

    @property
    def all_tokens(self) -> int:
        return self.system_tokens + self.tools_tokens + sum(self.tokens)


class Linter:
    """Takes requests in the order in which they were sent. Memory is bounded, whatever their number.

    `count` gives a text's tokens; the template's own are not counted. A request goes on from an earlier one when it
    holds that one's last user message and begins like it, or holds the message before that as well, or begins with
    that message where no other request with its system text ended in it.
    """

    def __init__(self, count: Callable[[str], int]) -> None:
        self._count = count
        self._texts = SystemTexts("report")
        self._sent: OrderedDict[tuple[str, int], list[_Sent]] = OrderedDict()
        self._held = 0
        self._systems: OrderedDict[int, tuple[str, int]] = OrderedDict()
        self._system_chars = 0
        self._last_system: OrderedDict[int, int] = OrderedDict()
        self.findings = Findings()

    def take(self, line: int, request: LoggedRequest) -> None:
        observed = self._texts.observe("", request.model, request.system, self._count)
        roles = [said.role for said in request.messages]
        digests = array("q", (hash((said.role, said.text)) for said in request.messages))
        system = hash(request.system)
        earlier = self._earlier(request.model, system, roles, digests)
        shared = _shared(earlier.messages, digests) if earlier else 0
        kept = list(earlier.tokens[:shared]) if earlier else []
        tokens = array("q", [*kept, *(self._count(said.text) for said in request.messages[shared:])])
        sent = _Sent(
            system=system,
            system_tokens=self._system_tokens(system, request.system),
            tools=tuple(map(hash, request.tools)),
            tools_tokens=sum(map(self._count, request.tools)),
            messages=digests,
            tokens=tokens,
        )
        findings = self.findings
        findings.requests += 1
        findings.prompt_tokens += sent.all_tokens
        lost = observed.report.lost_tokens if observed.report else 0
        if earlier is None:
            reused = self._system_shared(self._last_system.get(observed.text_id, 0), sent, request.system)
            findings.reused_tokens += reused
            findings.reusable_tokens += reused + lost
        else:
            kind, lost_here = self._compare(earlier, sent, request.system, shared)
            if kind == "system_changed" and observed.report is not None:
                lost = lost_here
            elif kind is not None:
                findings.breaks.setdefault(kind, Break()).add(line, lost_here)
        if observed.report is not None:
            self._volatile(line, request.model, observed, lost)
        self._last_system[observed.text_id] = system
        self._last_system.move_to_end(observed.text_id)
        while len(self._last_system) > MOST_TEXTS_TOLD:
            self._last_system.popitem(last=False)
        self._remember(request.model, roles, sent)

    def _volatile(self, line: int, model: str, observed: Observed, lost_tokens: int) -> None:
        told, report = self.findings.volatile, observed.report
        if report is None or (observed.text_id not in told and len(told) >= MOST_TEXTS_TOLD):
            return
        found = told.setdefault(observed.text_id, Volatile(model, line, report))
        found.report = report
        found.requests += 1
        found.lost_tokens += lost_tokens

    def _earlier(self, model: str, system: int, roles: list[str], digests: "array[int]") -> _Sent | None:
        """The request that this one goes on from."""
        asked = [place for place, role in enumerate(roles) if role == "user"]
        for place in reversed(asked[:-1]):
            found = self._sent.get((model, digests[place]))
            best = max(found, key=lambda sent: _shared(sent.messages, digests)) if found else None
            if best is None or found is None:
                continue
            before = place > 0 and len(best.messages) > 1 and best.messages[-2] == digests[place - 1]
            only = place == 0 and len(found) == 1 and best.system == system
            if before or only or _shared(best.messages, digests):
                return best
        return None

    def _compare(self, earlier: _Sent, sent: _Sent, system: str, shared: int) -> tuple[BreakKind | None, int]:
        """All of the earlier prompt could have been reused, up to where the two differ it can; the tokens between."""
        could = earlier.all_tokens
        kind: BreakKind | None = None
        can = earlier.system_tokens
        if earlier.system != sent.system:
            kind, can = "system_changed", self._system_shared(earlier.system, sent, system)
        elif earlier.tools != sent.tools:
            kind = "tools_order" if sorted(earlier.tools) == sorted(sent.tools) else "tools_changed"
        elif shared < len(earlier.messages):
            can += earlier.tools_tokens + sum(earlier.tokens[:shared])
            kind = _history_break(earlier, sent, shared)
        else:
            can = could
        self.findings.reusable_tokens += could
        self.findings.reused_tokens += can
        return kind, could - can

    def _system_tokens(self, digest: int, text: str) -> int:
        known = self._systems.get(digest)
        if known is not None:
            self._systems.move_to_end(digest)
            return known[1]
        tokens = self._count(text)
        self._systems[digest] = (text, tokens)
        self._system_chars += len(text)
        while self._system_chars > MOST_TEXT_CHARS and len(self._systems) > 1:
            _, (oldest, _) = self._systems.popitem(last=False)
            self._system_chars -= len(oldest)
        return tokens

    def _system_shared(self, earlier: int, sent: _Sent, text: str) -> int:
        """Tokens that two system texts begin with; 0 where the earlier one is not known any more."""
        if earlier == sent.system:
            return sent.system_tokens
        known = self._systems.get(earlier)
        return self._count(text[: common_prefix(known[0], text)]) if known else 0

    def _remember(self, model: str, roles: list[str], sent: _Sent) -> None:
        last = max((place for place, role in enumerate(roles) if role == "user"), default=None)
        if last is None:
            return
        upto = _Sent(
            sent.system,
            sent.system_tokens,
            sent.tools,
            sent.tools_tokens,
            sent.messages[: last + 1],
            sent.tokens[: last + 1],
        )
        key = (model, sent.messages[last])
        alike = self._sent.setdefault(key, [])
        self._sent.move_to_end(key)
        alike.append(upto)
        self._held += upto.held
        if len(alike) > MOST_ALIKE:
            self._held -= alike.pop(0).held
        while self._held > MOST_MESSAGES and len(self._sent) > 1:
            _, oldest = self._sent.popitem(last=False)
            self._held -= sum(other.held for other in oldest)


def _history_break(earlier: _Sent, sent: _Sent, shared: int) -> BreakKind:
    """The earlier request's last message stands nearer to the front when messages before it were dropped."""
    asked = earlier.messages[-1]
    place = max(at for at, digest in enumerate(sent.messages) if digest == asked)
    if place < len(earlier.messages) - 1:
        return "history_shortened"
    return "history_edited" if shared else "first_message"


def _shared(one: "array[int]", other: "array[int]") -> int:
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(place for place in range(length) if one[place] != other[place])
