"""What search finds on XQuAD and MTRAG: plain parts, the product, its constants varied, and its calibration."""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.corpus import TENANT, KnownQueries, embedded, fill_store
from bench.datasets import DataMissing, RetrievalSet, mtrag, xquad
from bench.report import Report
from retrieval.calibration import FITTED, Calibration, duplicates, features
from retrieval.database import Database
from retrieval.embedding import SentenceEmbedder
from retrieval.fusion import DEFAULT_FUSION, Fusion
from retrieval.index import Indexes
from retrieval.retriever import POOL_ROWS, Retriever, blend
from retrieval.store_view import Hit, StoreView
from retrieval.types import Query

PREVIOUS_TURN_WEIGHT = 0.3
CALIBRATED_ROWS = 10
BUCKETS = (0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0)

Ranking = Callable[[list[Hit]], list[Hit]]


@dataclass(frozen=True, slots=True)
class Goal:
    """Required recall at two depths."""

    load: Callable[[], RetrievalSet]
    depths: tuple[int, int]
    required: tuple[float, float]


GOALS = (
    Goal(lambda: xquad("en"), (1, 5), (0.930, 0.990)),
    Goal(lambda: xquad("vi"), (1, 5), (0.905, 0.980)),
    Goal(mtrag, (5, 10), (0.730, 0.865)),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """A set with its view, query vectors and weighted texts, and what the whole retriever ranked."""

    data: RetrievalSet
    goal: Goal
    view: StoreView
    vectors: list[NDArray[np.float32]]
    texts: list[dict[str, float]]
    ranked: list[list[int]]

    def hits(self, question: int, fusion: Fusion = DEFAULT_FUSION) -> list[Hit]:
        return self.view.search(self.vectors[question], self.texts[question], POOL_ROWS, fusion=fusion)

    def positions(self, hits: Sequence[Hit]) -> list[int]:
        """Passage indexes of hits: a passage's row is its place among the store's rows."""
        return [int(at) for at in np.searchsorted(self.view.row_ids, [hit.row_id for hit in hits])]


async def measure_quality(report: Report, embedder: SentenceEmbedder, cache_dir: Path, quick: bool) -> None:
    measured: list[Measured] = []
    for goal in GOALS[:2] if quick else GOALS:
        try:
            data = goal.load()
        except DataMissing as missing:
            report.note(f"skipped: {missing}")
            continue
        measured.append(await _measure(_part(data) if quick else data, goal, embedder, cache_dir))
    if not measured:
        return
    _print_recall(report, measured)
    if not quick:
        _print_sensitivity(report, measured)
    _print_calibration(report, measured, quick)


async def _measure(data: RetrievalSet, goal: Goal, embedder: SentenceEmbedder, cache_dir: Path) -> Measured:
    passages = await embedded(embedder, [passage.text for passage in data.passages], cache_dir)
    current = await embedded(embedder, [question.text for question in data.questions], cache_dir)
    before = [question.previous or "" for question in data.questions]
    previous = await embedded(embedder, before, cache_dir) if any(before) else current
    known = {question.text: current[at] for at, question in enumerate(data.questions)}
    known |= {text: previous[at] for at, text in enumerate(before) if text and text not in known}
    with tempfile.TemporaryDirectory() as folder:
        database = Database(Path(folder))
        database.bind_embedding_model(embedder.model_id, passages.shape[1])
        # Titles stay out: the plain parts were measured on the passages alone.
        untitled = [replace(passage, title="") for passage in data.passages]
        store_id = fill_store(database, data.name, untitled, passages)
        async with Indexes(database, Path(folder)) as indexes:
            view = await indexes.view(store_id, 0)
            retriever = Retriever(database, KnownQueries(known), indexes, PREVIOUS_TURN_WEIGHT)
            ranked = []
            for question in data.questions:
                query = Query(TENANT, (store_id,), question.text, question.previous, top_k=goal.depths[1])
                found = await retriever.search(query)
                ranked.append([candidate.chunk.ordinal for candidate in found.items])
            await retriever.aclose()
        database.close()
    vectors, texts = [], []
    for at, question in enumerate(data.questions):
        weighted = {question.text: 1.0}
        vector = current[at]
        if question.previous is not None:
            weighted.setdefault(question.previous, PREVIOUS_TURN_WEIGHT)
            vector = blend(vector, previous[at], PREVIOUS_TURN_WEIGHT)
        vectors.append(vector)
        texts.append(weighted)
    return Measured(data, goal, view, vectors, texts, ranked)


def _print_recall(report: Report, measured: Sequence[Measured]) -> None:
    arms: tuple[tuple[str, Ranking], ...] = (
        ("BM25 alone", lambda hits: sorted(hits, key=lambda hit: hit.lexical_rank or math.inf)),
        ("dense alone", lambda hits: sorted(hits, key=lambda hit: hit.dense_rank or math.inf)),
        ("equal-weight RRF", lambda hits: sorted(hits, key=_reciprocal_rank, reverse=True)),
    )
    rows: list[list[str | float]] = []
    for name, rank in arms:
        row: list[str | float] = [name]
        for one in measured:
            ranked = [one.positions(rank(one.hits(at))) for at in range(len(one.data.questions))]
            row += [recall(ranked, one, depth) for depth in one.goal.depths]
        rows.append(row)
    fused: list[str | float] = ["headstart, repeats kept"]
    product: list[str | float] = ["headstart, whole retriever"]
    for one in measured:
        as_fused = [one.positions(one.hits(at)) for at in range(len(one.data.questions))]
        with_repeats = _with_repeats(one.data)
        for depth, required in zip(one.goal.depths, one.goal.required, strict=True):
            kept, whole = recall(as_fused, one, depth), recall(one.ranked, one, depth, with_repeats)
            fused.append(kept)
            product.append(whole)
            report.at_least(f"{one.data.name} recall@{depth}", min(kept, whole), required)
    required_row: list[str | float] = ["required"]
    for one in measured:
        required_row += list(one.goal.required)
    columns = ["arm", *(f"{one.data.name} @{depth}" for one in measured for depth in one.goal.depths)]
    report.table("Recall, one setting for all", columns, [*rows, fused, product, required_row])
    report.note(
        "The whole retriever drops passages that repeat a better one; a listed passage counts for its repeats."
    )


def _print_sensitivity(report: Report, measured: Sequence[Measured]) -> None:
    base = DEFAULT_FUSION
    variants = [
        ("as shipped", base),
        *((f"dense weight x {by}", replace(base, dense_weight=base.dense_weight * by)) for by in (0.7, 1.3)),
        *((f"lost standing x {by}", replace(base, lost_standing=base.lost_standing * by)) for by in (0.7, 1.3)),
        *((f"sure standing x {by}", replace(base, sure_standing=base.sure_standing * by)) for by in (0.7, 1.3)),
        ("always trusted", replace(base, least_trust=1.0)),
    ]
    rows: list[list[str | float]] = []
    for name, fusion in variants:
        row: list[str | float] = [name]
        for one in measured:
            ranked = [one.positions(one.hits(at, fusion)) for at in range(len(one.data.questions))]
            row += [recall(ranked, one, depth) for depth in one.goal.depths]
        rows.append(row)
    columns = ["fusion", *(f"{one.data.name} @{depth}" for one in measured for depth in one.goal.depths)]
    report.table("The constants of the fusion, varied", columns, rows)


def _print_calibration(report: Report, measured: Sequence[Measured], quick: bool) -> None:
    """Fit on questions with an even index, look at the odd ones."""
    halves: tuple[list[tuple[float, float, bool]], list[tuple[float, float, bool]]] = ([], [])
    for one in measured:
        for at, question in enumerate(one.data.questions):
            hits = one.hits(at)[: CALIBRATED_ROWS + 1]
            found = features([hit.score for hit in hits])[:CALIBRATED_ROWS]
            for position, (score, lead) in zip(one.positions(hits), found, strict=False):
                halves[at % 2].append((score, lead, position in question.relevant))
    anew = fit_calibration(halves[0])
    predicted = np.array([_relevance(FITTED, score, lead) for score, lead, _ in halves[1]])
    relevant = np.array([label for _, _, label in halves[1]], dtype=np.float64)
    bucket = np.clip(np.searchsorted(BUCKETS, predicted, side="right") - 1, 0, len(BUCKETS) - 2)
    rows: list[tuple[str, int, float, float]] = []
    error = 0.0
    for at in range(len(BUCKETS) - 1):
        inside = bucket == at
        if inside.any():
            said, seen = float(predicted[inside].mean()), float(relevant[inside].mean())
            rows.append((f"{BUCKETS[at]:.2f} to {BUCKETS[at + 1]:.2f}", int(inside.sum()), said, seen))
            error += float(inside.mean()) * abs(said - seen)
    report.table("Relevance, on the half it was not fitted on", ("said", "candidates", "mean said", "true"), rows)
    report.note(
        f"calibration shipped {_constants(FITTED)}, fitted anew on the other half {_constants(anew)}; "
        f"mean |said - true| {error:.4f}"
    )
    if not quick:
        report.at_most("calibration error", error, 0.02)


def fit_calibration(samples: Sequence[tuple[float, float, bool]]) -> Calibration:
    """Logistic regression by Newton's method over (score, lead, relevant)."""
    inputs = np.array([(1.0, score, lead) for score, lead, _ in samples])
    labels = np.array([label for _, _, label in samples], dtype=np.float64)
    weights = np.zeros(3)
    for _ in range(30):
        probability = 1 / (1 + np.exp(-np.clip(inputs @ weights, -30, 30)))
        curvature = (inputs * (probability * (1 - probability))[:, None]).T @ inputs + 1e-3 * np.eye(3)
        weights += np.linalg.solve(curvature, inputs.T @ (labels - probability) - 1e-3 * weights)
    return Calibration(*(round(float(weight), 2) for weight in weights))


def recall(
    ranked: Sequence[Sequence[int]], one: Measured, depth: int, stands_for: Mapping[int, set[int]] | None = None
) -> float:
    """Mean over questions of the share of relevant passages among the first `depth`.

    `stands_for` gives the passages that a listed one stands for.
    """
    shares = []
    for question, found in zip(one.data.questions, ranked, strict=True):
        listed = set(found[:depth])
        if stands_for is not None:
            listed = set().union(*(stands_for[passage] for passage in listed))
        shares.append(len(set(question.relevant) & listed) / len(question.relevant))
    return round(float(np.mean(shares)), 4)


def _with_repeats(data: RetrievalSet) -> dict[int, set[int]]:
    """Each passage's index with those of the passages that say the same."""
    texts = [passage.text for passage in data.passages]
    repeats = duplicates(texts)
    stands_for = {index: {index} for index in range(len(texts))}
    for index in repeats:
        for other in range(len(texts)):
            if other != index and duplicates([texts[other], texts[index]]):
                stands_for[other].add(index)
                stands_for[index].add(other)
    return stands_for


def _reciprocal_rank(hit: Hit) -> float:
    return sum(1 / (60 + rank) for rank in (hit.dense_rank, hit.lexical_rank) if rank is not None)


def _relevance(calibration: Calibration, score: float, lead: float) -> float:
    return 1 / (1 + math.exp(-(calibration.constant + calibration.score * score + calibration.lead * lead)))


def _constants(calibration: Calibration) -> str:
    return f"({calibration.constant}, {calibration.score}, {calibration.lead})"


def _part(data: RetrievalSet) -> RetrievalSet:
    """The first 60 passages and every third of their questions."""
    kept = tuple(question for question in data.questions if max(question.relevant) < 60)[::3]
    return RetrievalSet(data.name, data.passages[:60], kept)
