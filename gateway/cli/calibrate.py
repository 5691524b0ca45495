"""`headstart calibrate`: measures the configured engine, shows the fit, and keeps it for the next `serve`."""

import asyncio
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson
import typer
from rich.table import Table

from gateway.backends.facts import EngineFacts, probe_engine
from gateway.backends.vllm import EngineLimits, EngineSession
from gateway.calibration import Calibration, CannotCalibrate, Probe, fit_errors, is_noisy
from gateway.calibration_steps import MOST_REQUESTS, Bounds, Sample
from gateway.cli.options import AsJson
from gateway.cli.terminal import CliError, err, load_settings, out, printable, run
from gateway.endpoints import parse_endpoints
from gateway.errors import ApiError
from gateway.settings import Settings
from gateway.speed import FOLDER
from gateway.speed_file import SpeedFiles, key_of
from latency.speed import SpeedEstimate
from retrieval.folder import FolderInUse, owned_folder

PROBES = 5


@dataclass(frozen=True, slots=True)
class Measured:
    """A whole calibration and what was fitted to it; `state` is what a gateway goes on from."""

    facts: EngineFacts
    samples: tuple[Sample, ...]
    estimate: SpeedEstimate
    state: bytes

    @property
    def errors(self) -> list[float]:
        return fit_errors(self.estimate.prefill, self.samples)

    @property
    def noisy(self) -> bool:
        return is_noisy(self.estimate.prefill, self.samples)


def calibrate(
    engine_url: Annotated[
        str | None,
        typer.Option(
            "--engine-url", "--url", help="Base URL of the engine, without /v1; several separated by commas."
        ),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder in which the gateway finds the result.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how fast the engine is, in a few seconds, and keep it. A running gateway does so by itself."""
    settings = load_settings(engine_url=engine_url, data_dir=data_dir)
    endpoints = parse_endpoints(settings.engine_url)
    documents: list[dict[str, Any]] = []
    noisy: list[str] = []
    for endpoint in endpoints:
        if len(endpoints) > 1 and not as_json:
            out().print(f"{endpoint.name}:", markup=False)
        measured = _measured_and_kept(settings.model_copy(update={"engine_url": endpoint.url}), quiet=as_json)
        documents.append({**({"replica": endpoint.name} if len(endpoints) > 1 else {}), **_document(measured)})
        if not as_json:
            _print(measured)
        if measured.noisy:
            noisy.append(
                f"Half of the fitted times of '{endpoint.name}' are off by {np.median(measured.errors):.0%} or more: "
                "the engine was not idle. Nothing of it was kept; try again when nobody uses it."
            )
    if as_json:
        document = documents if len(endpoints) > 1 else documents[0]
        typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
    if noisy:
        raise CliError(" ".join(noisy))
    if not as_json:
        out().print(f"Kept in {settings.data_dir / FOLDER} for the next 'headstart serve'.", markup=False)


def _measured_and_kept(settings: Settings, *, quiet: bool) -> Measured:
    """Raises CliError."""
    try:
        with owned_folder(settings.data_dir):
            measured = run(_measure(settings, quiet=quiet))
            if not measured.noisy:
                _keep(settings, measured)
            return measured
    except FolderInUse:
        raise CliError(
            f"A gateway runs on the data folder {settings.data_dir}. It calibrates the engine by itself while it is "
            "idle, and learns from every request. To calibrate by hand, stop it first."
        ) from None
    except OSError as error:
        raise CliError(f"The result cannot be written to {settings.data_dir}: {error.strerror}.") from error


async def _measure(settings: Settings, *, quiet: bool) -> Measured:
    """Raises CliError when the engine cannot be asked or measured."""
    limits = EngineLimits(
        settings.connect_timeout_s,
        settings.first_token_timeout_s,
        settings.between_tokens_timeout_s,
        settings.answer_timeout_s,
    )
    async with EngineSession(limits) as session:
        facts = await _facts(session, settings)
        probe = Probe(session, settings.engine_url, settings.engine_api_key, limits, facts)
        with err().status("asking the engine") as status:

            def told(sample: Sample) -> None:
                status.update(
                    f"request {len(calibration.samples)} of at most {MOST_REQUESTS}: "
                    f"{sample.uncached_tokens:,} tokens, {sample.cached_tokens:,} cached, {told_time(sample.ttft_s)}"
                )

            calibration = Calibration(probe, Bounds.of(facts), settings.safety_quantile, told=None if quiet else told)
            try:
                await calibration.run()
            except CannotCalibrate as reason:
                raise CliError(
                    f"The engine cannot be calibrated: {reason}. A gateway learns its speed from requests alone."
                ) from reason
            except ApiError as error:
                raise CliError(error.message) from error
    learner = calibration.learned()
    estimate = learner.estimate
    if estimate is None:
        raise CliError("The engine's window is too small to be measured.")
    return Measured(facts, tuple(calibration.samples), estimate, learner.dump())


async def _facts(session: Any, settings: Settings) -> EngineFacts:
    facts = EngineFacts(reachable=False)
    for _ in range(PROBES):
        facts = await probe_engine(session, settings.engine_url, settings.engine_api_key, model=settings.model)
        if not facts.reachable:
            raise CliError(
                f"The engine at {settings.engine_url} is not reachable: {facts.error}. Start one with 'headstart "
                "engine', or set HEADSTART_ENGINE_URL."
            )
        if facts.error:
            raise CliError(f"The engine cannot be used: {facts.error}.")
        if facts.conclusive:
            return facts
        await asyncio.sleep(1.0)
    raise CliError("The engine is too busy to answer one short request; try again when nobody uses it.")


def _keep(settings: Settings, measured: Measured) -> None:
    """Raises OSError."""
    key = key_of(measured.facts, settings.engine_url.rstrip("/"), platform.node())
    assert key is not None
    SpeedFiles(settings.data_dir / FOLDER).write(key, measured.state)


def _print(measured: Measured) -> None:
    console = out()
    model = measured.estimate.prefill
    table = Table(title=f"TTFT of {printable(measured.facts.model or '')}", title_justify="left")
    for name in ("uncached", "cached", "measured", "fitted", "error"):
        table.add_column(name, justify="right")
    for sample in sorted(
        _teaching(measured.samples), key=lambda sample: (sample.cached_tokens, sample.uncached_tokens)
    ):
        fitted_s = model.predict_s(sample.uncached_tokens, sample.cached_tokens)
        table.add_row(
            f"{sample.uncached_tokens:,}",
            f"{sample.cached_tokens:,}",
            told_time(sample.ttft_s),
            told_time(fitted_s),
            f"{fitted_s / sample.ttft_s - 1:+.1%}",
        )
    console.print(table)
    errors = measured.errors
    estimate = measured.estimate
    lines = [
        f"TTFT = {told_time(model.fixed_s)} + {told_time(model.per_token_s)} · uncached "
        f"+ {told_time(model.per_pair_s)} · uncached · (cached + uncached / 2)",
        f"error of the fit: {np.mean(errors):.1%} in the mean, {np.quantile(errors, 0.95):.1%} at p95",
        f"kept with probability {estimate.quantile:g}: {estimate.factor:.2f} times the prediction",
    ]
    if estimate.token_s is not None:
        lines.append(f"decode: {1 / estimate.token_s:.1f} tokens/s")
    console.print("\n".join(lines), markup=False, soft_wrap=True)


def _document(measured: Measured) -> dict[str, Any]:
    estimate, model, errors = measured.estimate, measured.estimate.prefill, measured.errors
    return {
        "model": measured.facts.model,
        "engine_version": measured.facts.version,
        "fixed_s": model.fixed_s,
        "per_token_s": model.per_token_s,
        "per_pair_s": model.per_pair_s,
        "factor": estimate.factor,
        "quantile": estimate.quantile,
        "token_s": estimate.token_s,
        "mean_error": float(np.mean(errors)),
        "p95_error": float(np.quantile(errors, 0.95)),
        "kept": not measured.noisy,
        "samples": [
            {
                "uncached_tokens": sample.uncached_tokens,
                "cached_tokens": sample.cached_tokens,
                "measured_s": sample.ttft_s,
                "fitted_s": model.predict_s(sample.uncached_tokens, sample.cached_tokens),
            }
            for sample in _teaching(measured.samples)
        ],
    }


def _teaching(samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.step.kind != "warm"]


def told_time(seconds: float) -> str:
    """Three significant digits in the unit that reads best."""
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
    unit, scale = next((pair for pair in units if seconds >= pair[1]), units[-1])
    return f"{seconds / scale:#.3g}".rstrip(".") + f" {unit}"
