"""The settings that are tried: budgets, most chunks and chunk sizes crossed, then variants around the best."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

VARIANTS: dict[str, tuple[str | int, ...]] = {
    "chunk_order": ("reuse", "relevance_last", "relevance_first", "label"),
    "pin_last": (0, 1, 2),
    "evidence_lines": (0, 1, 2),
}
"""What `--variants` tries, by its name in a request's `headstart` object."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What one request may differ in. None: as the gateway is set. `chunk_tokens` None: the store as it is.

    `again` marks the recommended setting measured once more, beside its variants and under the same conditions.
    """

    top_k: int
    budget_ms: float | None = None
    chunk_tokens: int | None = None
    chunk_order: str | None = None
    pin_last: int | None = None
    evidence_lines: int | None = None
    again: bool = False

    @property
    def name(self) -> str:
        """Unique, and readable in a table."""
        parts = [f"k={self.top_k}"]
        if self.budget_ms is not None:
            parts.append(f"{self.budget_ms:g} ms")
        if self.chunk_tokens is not None:
            parts.append(f"chunks of {self.chunk_tokens}")
        parts += [f"{name}={getattr(self, name)}" for name in VARIANTS if getattr(self, name) is not None]
        return ", ".join(parts) + (" (again)" if self.again else "")

    @property
    def varied(self) -> bool:
        """Whether it belongs to the second round."""
        return self.again or any(getattr(self, name) is not None for name in VARIANTS)

    def extension(self) -> dict[str, Any]:
        """The request's `headstart` object, without the store. A budget is never a reason to refuse here."""
        told: dict[str, Any] = {name: getattr(self, name) for name in ("top_k", *VARIANTS)}
        if self.budget_ms is not None:
            told |= {"ttft_budget_ms": self.budget_ms, "policy": "best_effort"}
        return {name: value for name, value in told.items() if value is not None}

    def variables(self) -> dict[str, str | int | float]:
        """The gateway's settings that make it the default."""
        by_name = {
            "HEADSTART_TOP_K": self.top_k,
            "HEADSTART_TTFT_BUDGET_MS": self.budget_ms,
            "HEADSTART_CHUNK_TOKENS": self.chunk_tokens,
            "HEADSTART_CHUNK_OVERLAP_TOKENS": None if self.chunk_tokens is None else overlap(self.chunk_tokens),
            "HEADSTART_CHUNK_ORDER": self.chunk_order,
            "HEADSTART_PIN_LAST": self.pin_last,
            "HEADSTART_EVIDENCE_LINES": self.evidence_lines,
        }
        return {name: value for name, value in by_name.items() if value is not None}

    def wire(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "again"}


def overlap(chunk_tokens: int) -> int:
    """Tokens that neighbouring chunks share: an eighth, as in the gateway's defaults."""
    return chunk_tokens // 8


def grid(
    budgets_ms: Sequence[float | None], top_ks: Sequence[int], chunk_tokens: Sequence[int | None]
) -> tuple[Setting, ...]:
    """All combinations. The smallest k first, as its answers come soonest."""
    return tuple(
        Setting(top_k, budget_ms, size)
        for size in chunk_tokens
        for budget_ms in budgets_ms
        for top_k in sorted(top_ks)
    )


def variants(base: Setting, names: Sequence[str]) -> tuple[Setting, ...]:
    """`base` again, and with one thing changed at a time."""
    return (replace(base, again=True), *_changed(base, names))


def _changed(base: Setting, names: Sequence[str]) -> Iterator[Setting]:
    for name in names:
        for value in VARIANTS[name]:
            change: dict[str, Any] = {name: value}
            yield replace(base, **change)
