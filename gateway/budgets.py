"""How long a request may take: what it says, what its store says, what the settings say."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from gateway.context import RequestContext
from gateway.wire import MOST_BUDGET_MS, ChatRequest, invalid

HEADER = "X-TTFT-Budget-Ms"
METADATA_KEY = "ttft_budget_ms"
TOTAL_FIELD = "headstart.total_budget_ms"

# Codes of refusals because of time.
TOO_SMALL = "ttft_budget_too_small"
BUSY = "ttft_budget_busy"
QUEUE_FULL = "queue_full"

_RANGE = f"a number of milliseconds above 0 and at most {MOST_BUDGET_MS:,.0f}"


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds from the request's arrival; None is no bound. `strict` refuses what is predicted to miss it.

    `source` names what set the TTFT budget, for the message of a refusal.
    """

    ttft_s: float | None = None
    total_s: float | None = None
    strict: bool = False
    source: str | None = None

    def deadline_s(self, context: RequestContext) -> float | None:
        """When the first token is due, on the monotonic clock."""
        return None if self.ttft_s is None else context.started_s + self.ttft_s


class StoreMetadata(Protocol):
    def metadata(self, tenant: str, store_id: str) -> Mapping[str, str]:
        """Raises NotFound."""


class Budgets:
    """The request's own field wins over its header, the header over the stores, the stores over the setting."""

    def __init__(self, stores: StoreMetadata, default_ms: float, strict: bool) -> None:
        self._stores = stores
        self._default_ms = default_ms
        self._strict = strict

    async def of(self, request: ChatRequest, context: RequestContext, store_ids: tuple[str, ...]) -> Budget:
        """Raises ApiError (400) for a header that is not a budget; NotFound for a store."""
        extension = request.headstart
        stated_ms = extension.ttft_budget_ms if extension else None
        policy = extension.policy if extension else None
        source: str | None = "headstart.ttft_budget_ms"
        # A header that is wrong is refused even where the field wins: its sender believes in it.
        header_ms = None if context.budget_header is None else read_budget_header(context.budget_header)
        if stated_ms is None:
            stated_ms, source = header_ms, HEADER
        if stated_ms is None and store_ids:
            stated_ms = await asyncio.to_thread(self._of_stores, context.tenant, store_ids)
            source = f"metadata.{METADATA_KEY}"
        if stated_ms is None:
            stated_ms, source = self._default_ms or None, "HEADSTART_TTFT_BUDGET_MS"
        total_ms = extension.total_budget_ms if extension else None
        return Budget(
            ttft_s=None if stated_ms is None else stated_ms / 1000,
            total_s=None if total_ms is None else total_ms / 1000,
            strict=self._strict if policy is None else policy == "strict",
            source=None if stated_ms is None else source,
        )

    def _of_stores(self, tenant: str, store_ids: tuple[str, ...]) -> float | None:
        """The smallest of the stores' defaults; one that was stored before it was checked may be no budget."""
        stated = [self._stores.metadata(tenant, store_id).get(METADATA_KEY, "") for store_id in store_ids]
        return min((ms for text in stated if (ms := _milliseconds(text)) is not None), default=None)


def read_budget_header(raw: bytes) -> float:
    """Milliseconds. Raises ApiError (400)."""
    ms = _milliseconds(raw.decode("latin-1"))
    if ms is None:
        raise invalid(f"{HEADER}: must be {_RANGE}.", HEADER)
    return ms


def check_store_metadata(metadata: Mapping[str, str] | None) -> None:
    """Raises ApiError (400) when a store's default budget is not one."""
    if metadata is None or METADATA_KEY not in metadata:
        return
    if _milliseconds(metadata[METADATA_KEY]) is None:
        raise invalid(f"metadata.{METADATA_KEY}: must be {_RANGE}, as text.", f"metadata.{METADATA_KEY}")


def _milliseconds(text: str) -> float | None:
    text = text.strip()
    # `float` also reads underscores, other digits than 0-9, and names.
    if not text.isascii() or len(text) > 32 or not all(char in "0123456789.+eE-" for char in text):
        return None
    try:
        ms = float(text)
    except ValueError:
        return None
    return ms if math.isfinite(ms) and 0 < ms <= MOST_BUDGET_MS else None
