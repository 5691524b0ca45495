"""The whole measuring: stores, rounds, order, and what is kept when it is interrupted."""

import asyncio
import hashlib
import random
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gateway.cli.client import GatewayClient, Store, StoreFile
from gateway.cli.terminal import USAGE, CliError
from gateway.tuning.grid import Setting, variants
from gateway.tuning.journal import Journal, Measurement, Subject
from gateway.tuning.measure import Meter
from gateway.tuning.questions import Question, base_name, digest
from gateway.tuning.recommend import Recommendation, Wishes, recommend, recommend_variant
from gateway.tuning.scratch import rechunked

_SEED = 11
_FAILURES_IN_A_ROW = 8


class Watcher(Protocol):
    """What is told of the progress."""

    def begin(self, what: str, total: int, done: int = 0) -> None: ...

    def advance(self) -> None: ...

    def say(self, line: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be measured. `places` are the questions asked, by their place in the file."""

    questions: Sequence[Question]
    places: Sequence[int]
    store: str
    settings: Sequence[Setting]
    variants: Sequence[str]
    model: str | None
    max_tokens: int
    wishes: Wishes
    journal: Path
    fresh: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """`settings` and `tried` are the two rounds; `expected` is how many measurements both need."""

    order: Order
    store: Store
    model: str
    missing: tuple[str, ...]
    settings: tuple[Setting, ...]
    tried: tuple[Setting, ...]
    done: Mapping[tuple[str, int], Measurement]
    expected: int
    interrupted: bool
    recommendation: Recommendation | None
    variant: Recommendation | None


async def sweep(client: GatewayClient, order: Order, watcher: Watcher) -> Outcome:
    """Measures what the journal does not hold yet. A cancellation ends it early, with what is done."""
    store = await client.require_store(order.store)
    files = [file for file in await client.store_files(store.id) if file.status == "completed"]
    if not files:
        raise CliError(f"Store '{store.name}' holds no document.", USAGE)
    missing = _missing(order, files)
    model = order.model or next(iter(await client.models()), None)
    if model is None:
        raise CliError("The gateway serves no model: its engine is not there. 'headstart doctor' says more.")
    if order.fresh:
        order.journal.unlink(missing_ok=True)
    subject = Subject(digest(order.questions), store.id, _content(store, files), model, order.max_tokens)
    with Journal(order.journal, subject, secrets.token_hex(4)) as journal:
        if journal.done:
            watcher.say(f"Going on with {len(journal.done):,} measurements of {order.journal} (--fresh starts over).")
        meter = Meter(client, model, order.max_tokens, journal.run)
        rounds = _Rounds(order, journal, meter, watcher)
        interrupted = False
        try:
            async with _stores(client, store, files, rounds.sizes(), journal.run, watcher) as stores:
                await rounds.run(stores)
        except asyncio.CancelledError:
            # Ctrl-C: what is measured is kept and told.
            interrupted = True
        return rounds.outcome(store, model, missing, interrupted)


class _Rounds:
    """The grid first, then the variants around what the grid recommends."""

    def __init__(self, order: Order, journal: Journal, meter: Meter, watcher: Watcher) -> None:
        self._order = order
        self._journal = journal
        self._meter = meter
        self._watcher = watcher
        self._tried: tuple[Setting, ...] = ()
        self._failures = 0

    def sizes(self) -> list[int | None]:
        """The chunk sizes of which something is left to measure; all where variants of any may follow."""
        return list(
            dict.fromkeys(
                setting.chunk_tokens
                for setting in self._order.settings
                if self._order.variants or not all(self._holds(setting, place) for place in self._order.places)
            )
        )

    async def run(self, stores: Mapping[int | None, str]) -> None:
        await self._round("measuring", self._order.settings, stores)
        base = self._base()
        if self._order.variants and base is not None:
            self._tried = variants(base, self._order.variants)
            await self._round("measuring variants", self._tried, stores)

    def outcome(self, store: Store, model: str, missing: tuple[str, ...], interrupted: bool) -> Outcome:
        order = self._order
        chosen = recommend(order.settings, self._journal.done, order.wishes)
        variant = None
        if self._tried:
            variant = recommend_variant(self._tried[0], self._tried[1:], self._journal.done)
        rounds = (*order.settings, *self._tried)
        wanted = {(setting.name, place) for setting in rounds for place in order.places}
        done = {key: measurement for key, measurement in self._journal.done.items() if key in wanted}
        return Outcome(
            order=order,
            store=store,
            model=model,
            missing=missing,
            settings=tuple(order.settings),
            tried=self._tried,
            done=done,
            expected=len(wanted),
            interrupted=interrupted,
            recommendation=chosen,
            variant=variant,
        )

    def _base(self) -> Setting | None:
        """Variants need a setting to vary: the recommended, else the one with most chunks and no budget."""
        chosen = recommend(self._order.settings, self._journal.done, self._order.wishes)
        if chosen is not None:
            return chosen.setting
        return max(self._order.settings, key=lambda setting: (setting.budget_ms is None, setting.top_k), default=None)

    async def _round(self, what: str, settings: Sequence[Setting], stores: Mapping[int | None, str]) -> None:
        """Question by question, all settings of one in an order of its own, so that noise strikes all alike."""
        places = self._order.places
        left = [(setting, place) for setting in settings for place in places if not self._holds(setting, place)]
        self._watcher.begin(what, len(settings) * len(places), len(settings) * len(places) - len(left))
        if left:
            await self._warm_up(left[0][0], stores)
        for place in places:
            turn = [setting for setting in settings if not self._holds(setting, place)]
            random.Random(f"{_SEED} {place}").shuffle(turn)
            for setting in turn:
                question = self._order.questions[place]
                self._take(await self._meter.measure(setting, place, question, stores[setting.chunk_tokens]))
                self._watcher.advance()

    async def _warm_up(self, setting: Setting, stores: Mapping[int | None, str]) -> None:
        """One answer that does not count: the first of a process pays for what is loaded then."""
        question = self._order.questions[self._order.places[0]]
        await self._meter.measure(setting, 0, question, stores[setting.chunk_tokens], warm_up=True)

    def _holds(self, setting: Setting, place: int) -> bool:
        return (setting.name, place) in self._journal.done

    def _take(self, measurement: Measurement) -> None:
        self._journal.add(measurement)
        self._failures = self._failures + 1 if measurement.error else 0
        if self._failures >= _FAILURES_IN_A_ROW:
            raise CliError(f"{self._failures} requests in a row failed, the last with: {measurement.error}")


@asynccontextmanager
async def _stores(
    client: GatewayClient,
    store: Store,
    files: Sequence[StoreFile],
    sizes: Sequence[int | None],
    run: str,
    watcher: Watcher,
) -> AsyncIterator[Mapping[int | None, str]]:
    """The ids of the stores by their chunk size; None is the user's own."""
    async with AsyncExitStack() as owned:
        stores: dict[int | None, str] = {}
        for size in sizes:
            if size is None:
                stores[None] = store.id
                continue
            watcher.begin(f"cutting anew into {size} tokens", len(files))
            scratch = await owned.enter_async_context(rechunked(client, store, files, size, run, watcher.advance))
            stores[size] = scratch.id
        yield stores


def _missing(order: Order, files: Sequence[StoreFile]) -> tuple[str, ...]:
    """Known documents that the store does not hold: no setting finds them. Raises CliError (2) when it has none."""
    held = {base_name(name) for file in files for name in (file.filename, str(file.attributes.get("path", "")))}
    known = {document for place in order.places for document in order.questions[place].documents}
    missing = tuple(sorted(known - held))
    if known and len(missing) == len(known):
        raise CliError(
            f"Store '{order.store}' holds none of the documents that the questions name ({', '.join(missing[:3])}…).",
            USAGE,
        )
    return missing


def _content(store: Store, files: Sequence[StoreFile]) -> str:
    """Changes when files come, go or are cut anew."""
    held = ",".join(sorted(file.id for file in files))
    return hashlib.sha256(f"{store.usage_bytes} {held}".encode()).hexdigest()
