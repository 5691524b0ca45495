"""The report as one HTML file that needs nothing else: no network, no other file."""

from importlib.resources import files

import orjson
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from gateway.tuning.figures import figures
from gateway.tuning.results import Results


def report_html(told: Results) -> str:
    """About 5 MB, nearly all of it the plots' library. Raises IndexError without a summary."""
    shown = figures(told)
    tables = [("Settings", told.grid, told.recommendation)]
    if told.variants:
        tables.append(("Variants", told.variants, told.variant))
    return (
        _template_environment()
        .from_string(_template())
        .render(
            told=told,
            tables=tables,
            figures=shown,
            figures_json=_inside_script(orjson.dumps(shown).decode()),
            library=Markup(get_plotlyjs()),
        )
    )


def _template_environment() -> Environment:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"share": _share, "ms": _ms, "decimal": _decimal, "figure": _figure}
    return environment


def _template() -> str:
    return files("gateway.tuning").joinpath("report.html").read_text("utf-8")


def _inside_script(json: str) -> Markup:
    """A store's name must not be able to end the script element."""
    return Markup(json.replace("<", "\\u003c"))


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f} ms"


def _decimal(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _figure(value: float | str | None) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else f"{value:g}"
