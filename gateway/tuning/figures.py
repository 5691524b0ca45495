"""The plots of a report, as figures of plotly.js: data and layout."""

from collections.abc import Sequence
from typing import Any

from gateway.tuning.results import Results
from gateway.tuning.statistics import Summary

Figure = dict[str, Any]

_MARKED = "#c2410c"
_PLAIN = "#2563eb"
# Settings from top to bottom as in the table, however long their names.
_NAMES = {"automargin": True, "autorange": "reversed", "type": "category"}
_MOST_LINES = 24  # more lines are not told apart


def figures(told: Results) -> list[Figure]:
    """Those for which there is something to draw."""
    shown = [_quality_over_ttft(told), _distribution(told, told.grid, "TTFT of each setting")]
    if any(summary.attainment is not None for summary in told.grid):
        shown.append(_budgets(told.grid))
    if any(summary.words is not None for summary in told.grid):
        shown.append(_words(told.grid, told, "Answer words found"))
    if told.variants and any(summary.words is not None for summary in told.variants):
        shown.append(_words(told.variants, told, "Answer words found, variants"))
    return [figure for figure in shown if figure["data"]]


def _quality_over_ttft(told: Results) -> Figure:
    by_recall = any(summary.recall is not None for summary in told.grid)
    points = [
        (summary, quality)
        for summary in told.grid
        for quality in (summary.recall if by_recall else summary.words,)
        if quality is not None and summary.ttft_p95_ms is not None
    ]
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": summary.setting.name,
            "x": [summary.ttft_p95_ms],
            "y": [quality],
            "marker": {"size": 20, "symbol": "star"} if _chosen(summary, told) else {"size": 12},
            "hovertemplate": "p95 %{x:.0f} ms, %{y:.1%}<extra>%{fullData.name}</extra>",
        }
        for summary, quality in points
    ]
    what = "recall of the known documents" if by_recall else "answer words found"
    return _figure(
        "What a longer wait buys (the star is recommended)",
        data,
        xaxis={"title": {"text": "p95 TTFT, ms"}, "rangemode": "tozero"},
        yaxis={"title": {"text": what}, "tickformat": ".1%"},
        showlegend=True,
    )


def _distribution(told: Results, summaries: Sequence[Summary], title: str) -> Figure:
    """Share of requests whose TTFT is at most so much: what any budget would have kept."""
    data = []
    for summary in summaries[:_MOST_LINES]:
        ttfts = told.ttfts_ms.get(summary.setting.name, [])
        if ttfts:
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": summary.setting.name,
                    "x": ttfts,
                    "y": [(place + 1) / len(ttfts) for place in range(len(ttfts))],
                    "line": {"shape": "hv", "width": 4 if _chosen(summary, told) else 1.5},
                }
            )
    return _figure(
        title,
        data,
        xaxis={"title": {"text": "TTFT, ms"}, "type": "log", "dtick": "D2", "tickformat": ",.0f"},
        yaxis={"title": {"text": "requests within"}, "tickformat": ".0%", "range": [0, 1.01]},
    )


def _budgets(summaries: Sequence[Summary]) -> Figure:
    held = [summary for summary in summaries if summary.attainment is not None]
    names = [summary.setting.name for summary in held]
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": "kept",
            "y": names,
            "x": [summary.attainment for summary in held],
            "marker": {"color": _PLAIN},
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": "goodput per second",
            "y": names,
            "x": [summary.goodput_per_s for summary in held],
            "xaxis": "x2",
            "marker": {"size": 12, "color": _MARKED},
        },
    ]
    return _figure(
        "Budgets kept, and answers within them per second",
        data,
        xaxis={"title": {"text": "kept; upper scale: goodput per second"}, "tickformat": ".0%", "range": [0, 1.01]},
        xaxis2={"overlaying": "x", "side": "top", "rangemode": "tozero", "showgrid": False},
        yaxis=_NAMES,
        margin={"t": 100, "r": 60},
        legend={"orientation": "h", "y": -0.2},
    )


def _words(summaries: Sequence[Summary], told: Results, title: str) -> Figure:
    known = [summary for summary in summaries if summary.words is not None]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [summary.setting.name for summary in known],
            "x": [summary.words for summary in known],
            "marker": {"color": [_colour(summary, told) for summary in known]},
            "error_x": {"type": "data", "array": [summary.words_error for summary in known]},
        }
    ]
    return _figure(
        f"{title} (bars: one standard error)",
        data if known else [],
        xaxis={"title": {"text": "share"}, "tickformat": ".0%", "rangemode": "tozero"},
        yaxis=_NAMES,
        showlegend=False,
    )


def _figure(title: str, data: list[dict[str, Any]], **layout: Any) -> Figure:
    shared: dict[str, Any] = {"title": {"text": title}, "margin": {"t": 60, "r": 60}, "font": {"size": 13}}
    return {"data": data, "layout": {**shared, **layout}}


def _colour(summary: Summary, told: Results) -> str:
    return _MARKED if _chosen(summary, told) else _PLAIN


def _chosen(summary: Summary, told: Results) -> bool:
    return any(
        chosen is not None and chosen.setting == summary.setting for chosen in (told.recommendation, told.variant)
    )
