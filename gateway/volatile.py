"""System texts that change from request to request: found by comparing them, reported, moved where that is asked."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gateway.known_texts import KnownText, Sight, bounded_text, nearest_text
from gateway.metrics import Metrics
from gateway.wire import ChatRequest
from prompt_builder.movable import Split, split
from prompt_builder.types import Transcript
from prompt_builder.versions import Changing, changing_lines
from prompt_builder.volatile import HOLE, ChangeKind

log = logging.getLogger("headstart.volatile")

VolatileMode = Literal["report", "move", "off"]

MOST_TEXTS = 8
"""System texts remembered of one tenant and model; the one that was seen longest ago leaves."""

MOST_KEPT_CHARS = 16 * 2**20
"""Characters remembered of all; the tenant and model that were seen longest ago leave."""

MOST_MOVED = 0.25
STILL_MOVED = 0.5
"""Share of the text: above the first nothing begins to be moved, above the second nothing is any more."""

MOST_SHOWN = 32


@dataclass(frozen=True, slots=True)
class VolatileLine:
    """`line` counts from 1; `text` shows what does not change, `…` for the rest."""

    line: int
    text: str
    kind: ChangeKind


@dataclass(frozen=True, slots=True)
class VolatileText:
    """What keeps changing in a system text.

    `lost_tokens` stand behind the first change, do not change themselves, and cannot be reused; 0 where the lines are
    `moved`. Of `requests` with this text `changed` brought another version. `reason` says why nothing was moved
    although it was asked for.
    """

    lines: tuple[VolatileLine, ...]
    lost_tokens: int
    requests: int
    changed: int
    moved: bool = False
    reason: str | None = None

    def wire(self) -> dict[str, Any]:
        return {
            "lines": [{"line": line.line, "text": line.text, "kind": line.kind} for line in self.lines],
            "lost_tokens": self.lost_tokens,
            "requests": self.requests,
            "changed": self.changed,
            "moved": self.moved,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Observed:
    """What is known of a request's system text. `split` only where lines are to be moved.

    `text_id` tells texts of one gateway apart; versions of one share it. `lost_tokens` as in the report, were nothing
    moved.
    """

    text: str
    text_id: int = 0
    report: VolatileText | None = None
    split: Split | None = None
    lost_tokens: int = 0

    def moved_in(self, transcript: Transcript) -> Transcript | None:
        """The transcript with the changing lines behind the chunks; None where it has another system text."""
        if self.split is None or transcript.system != self.text:
            return None
        return replace(transcript, system=self.split.stays, facts=self.split.facts)

    def not_moved(self, reason: str) -> "Observed":
        """The same for a request whose lines cannot be moved."""
        if self.report is None or self.split is None:
            return self
        return replace(
            self, report=replace(self.report, lost_tokens=self.lost_tokens, moved=False, reason=reason), split=None
        )


UNSEEN = Observed("")


@dataclass(slots=True)
class VolatileCounts:
    """Since the start: requests with a volatile system text, those whose lines were moved, tokens not reused."""

    requests: int = 0
    moved: int = 0
    lost_tokens: int = 0


class SystemTexts:
    """What is remembered of system texts, by tenant and model: nothing of one is compared with another's.

    Bounded by MOST_TEXTS for one tenant and model and MOST_KEPT_CHARS in all.
    """

    def __init__(self, mode: VolatileMode) -> None:
        self._mode = mode
        self._known: OrderedDict[tuple[str, str], list[KnownText]] = OrderedDict()
        self._chars: dict[tuple[str, str], int] = {}
        self._kept_chars = 0
        self._made = 0
        self.counts = VolatileCounts()

    @property
    def volatile(self) -> int:
        """Texts that are volatile now."""
        return sum(any(text.versions.volatile()) for texts in self._known.values() for text in texts)

    @property
    def kept(self) -> int:
        """Texts that are remembered."""
        return sum(map(len, self._known.values()))

    def observe(self, tenant: str, model: str, text: str, count: Callable[[str], int]) -> Observed:
        """A request with this system text; what is known of it from earlier ones. `count` gives a text's tokens.

        Takes O(n log n) in the text's lines, and time for the tokens only where something is reported.
        """
        if self._mode == "off" or not text:
            return UNSEEN
        key = (tenant, model)
        looked_at, rest = bounded_text(text)
        known = self._found(key, looked_at)
        observed = self._observed(known, text, rest, count)
        self._bound(key)
        return observed

    def answered(self, tenant: str, model: str, observed: Observed) -> VolatileText | None:
        """Counts what became of a request's text, and logs each text once; its report."""
        report = observed.report
        if report is None:
            return None
        self.counts.requests += 1
        self.counts.moved += report.moved
        self.counts.lost_tokens += report.lost_tokens
        known = next((known for known in self._known[tenant, model] if known.text_id == observed.text_id), None)
        if known is not None and not known.told:
            known.told = True
            _tell(tenant, model, report)
        return report

    def _found(self, key: tuple[str, str], text: str) -> KnownText:
        """The text that this is a version of, with this version; the last one of its list."""
        texts = self._known.setdefault(key, [])
        self._known.move_to_end(key)
        digest = hash(text)
        for known in reversed(texts):
            if known.last == digest:
                known.versions.same()
                break
        else:
            sight = Sight(text, text.split("\n"))
            nearest = nearest_text(texts, sight)
            if nearest is None:
                self._made += 1
                known = KnownText(self._made, text, sight.lines)
                texts.append(known)
            else:
                known = nearest
                known.versions.take(sight.lines)
                known.last = digest
        texts.remove(known)
        texts.append(known)
        del texts[:-MOST_TEXTS]
        return known

    def _observed(self, known: KnownText, text: str, rest: str, count: Callable[[str], int]) -> Observed:
        versions = known.versions
        moving = list(versions.established()) if self._mode == "move" else []
        shown = moving or list(versions.volatile())
        if not shown:
            return Observed(text, known.text_id)
        report = VolatileText(_shown(shown), 0, versions.requests, versions.changed)
        lines = versions.last
        behind = _behind(lines, shown) + rest
        key = hash(behind)
        if known.behind[0] != key:
            known.behind = (key, count(behind))
        lost = known.behind[1]
        if moving:
            parts = split(lines, changing_lines(moving))
            if parts.share <= (STILL_MOVED if known.moving else MOST_MOVED):
                known.moving = True
                if not parts.facts:
                    return Observed(text, known.text_id)
                parts = replace(parts, stays=parts.stays + rest)
                return Observed(text, known.text_id, replace(report, moved=True), parts, lost)
            report = replace(report, reason=_too_much(parts.share))
        return Observed(text, known.text_id, replace(report, lost_tokens=lost), None, lost)

    def _bound(self, key: tuple[str, str]) -> None:
        """After a change of this key's texts."""
        chars = sum(text.versions.chars + text.features_chars for text in self._known[key])
        self._kept_chars += chars - self._chars.get(key, 0)
        self._chars[key] = chars
        while self._kept_chars > MOST_KEPT_CHARS and len(self._known) > 1:
            oldest, _ = self._known.popitem(last=False)
            self._kept_chars -= self._chars.pop(oldest)


def leading_system(request: ChatRequest) -> str:
    """The request's leading system messages, joined as a transcript joins them."""
    texts = []
    for message in request.messages:
        if message.role not in ("system", "developer"):
            break
        texts.append(message.text)
    return "\n\n".join(texts)


def volatile_metrics(metrics: Metrics, texts: SystemTexts) -> None:
    """What was found since the start, read when it is scraped."""
    counts = texts.counts
    metrics.gauge(
        "headstart_volatile_texts", "System texts that change from request to request", lambda: texts.volatile
    )
    metrics.gauge("headstart_volatile_requests", "Requests with such a text", lambda: counts.requests)
    metrics.gauge("headstart_volatile_requests_moved", "Of these, moved", lambda: counts.moved)
    metrics.gauge("headstart_volatile_lost_tokens", "Stable tokens not reused", lambda: counts.lost_tokens)


def _shown(places: Sequence[Changing]) -> tuple[VolatileLine, ...]:
    found = [
        VolatileLine(line + 1, place.part.mask.excerpt if place.part.mask else HOLE, place.part.kind)
        for place in places
        for line in place.lines
    ]
    return tuple(found[:MOST_SHOWN])


def _behind(lines: Sequence[str], places: Sequence[Changing]) -> str:
    """What does not change, from the first change on."""
    first = places[0]
    changing = changing_lines(places)
    tail = first.part.mask.after if first.part.mask else ""
    return "\n".join([tail, *(lines[at] for at in range(first.first, len(lines)) if at not in changing)])


def _too_much(share: float) -> str:
    return f"{share:.0%} of the text would have to be moved; at most {MOST_MOVED:.0%} is."


def _tell(tenant: str, model: str, report: VolatileText) -> None:
    """Figures and names, never text."""
    fields = {
        "tenant": tenant,
        "model": model,
        "lines": ",".join(str(line.line) for line in report.lines),
        "kinds": ",".join(sorted({line.kind for line in report.lines})),
        "lost_tokens": report.lost_tokens,
        "moved": report.moved,
    }
    log.info("a system text changes from request to request", extra={"fields": fields})
