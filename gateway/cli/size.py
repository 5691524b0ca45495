"""`headstart size`: what a model needs of a card, and what the card gives of it, before either is bought."""

from pathlib import Path
from typing import Annotated

import orjson
import typer

from gateway.cli.model_config import ModelFacts, read_model
from gateway.cli.options import AsJson
from gateway.cli.quantities import number, whole
from gateway.cli.size_facts import Card, Load, Model, Sizing
from gateway.cli.size_report import size_report
from gateway.cli.terminal import USAGE, CliError, out
from latency.sizing import GB, KvShape, weight_bytes

CONTEXTS = (4_000, 20_000, 128_000)


def size(
    model: Annotated[
        Path | None, typer.Argument(help="A model's folder or its config.json; the options replace what it says.")
    ] = None,
    layers: Annotated[int | None, typer.Option(parser=whole("--layers"), help="Layers of the model.")] = None,
    kv_heads: Annotated[
        int | None, typer.Option(parser=whole("--kv-heads"), help="Heads that keep keys and values, per layer.")
    ] = None,
    head_dim: Annotated[int | None, typer.Option(parser=whole("--head-dim"), help="Numbers per head.")] = None,
    kv_bits: Annotated[
        float, typer.Option(parser=number("--kv-bits", most=64), help="Bits per number in the KV cache.")
    ] = 16.0,
    kv_bytes_per_token: Annotated[
        float | None,
        typer.Option(parser=number("--kv-bytes-per-token"), help="The KV cache of a token, instead of its shape."),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(parser=whole("--context"), help="Tokens of a conversation; may be given several times."),
    ] = None,
    parameters: Annotated[
        float | None, typer.Option(parser=number("--parameters"), help="Weights of the model, such as 8B.")
    ] = None,
    weight_bits: Annotated[
        float | None,
        typer.Option(parser=number("--weight-bits", most=64), help="Bits per weight: 16, 8, 4.5 …  [default: 16]"),
    ] = None,
    weights: Annotated[
        float | None, typer.Option(parser=number("--weights"), help="Size of the weights, GB.")
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(parser=number("--bandwidth"), help="Effective memory bandwidth, GB/s.")
    ] = None,
    tflops: Annotated[
        float | None, typer.Option(parser=number("--tflops"), help="Effective computing rate, 10^12 operations/s.")
    ] = None,
    vram: Annotated[float | None, typer.Option(parser=number("--vram"), help="Memory of the card, GB.")] = None,
    vram_share: Annotated[
        float, typer.Option(parser=number("--vram-share", most=1), help="Part of it that the engine takes.")
    ] = 0.9,
    batch: Annotated[
        int | None, typer.Option(parser=whole("--batch", most=10**6), help="Answers that decode side by side.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(parser=whole("--prompt-tokens", least=0), help="Uncached tokens of a prompt.")
    ] = None,
    prefill_rate: Annotated[
        float | None, typer.Option(parser=number("--prefill-rate"), help="Prompt tokens per second.")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(parser=whole("--output-tokens", least=0), help="Tokens of an answer.")
    ] = None,
    decode_rate: Annotated[
        float | None, typer.Option(parser=number("--decode-rate"), help="Answer tokens per second.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Work out memory, speed limits and answer times from a model's config.json or from numbers."""
    _together({"--layers": layers, "--kv-heads": kv_heads, "--head-dim": head_dim})
    given = None
    if layers is not None and kv_heads is not None and head_dim is not None:
        given = KvShape(layers, kv_heads, head_dim, kv_bits / 8)
    facts = None
    if model is not None:
        facts = read_model(model, kv_bits / 8, reads_shape=given is None and kv_bytes_per_token is None)
    shape = given or (facts.shape if facts else None)
    per_token = kv_bytes_per_token or (shape.bytes_per_token if shape else None)
    held, count = _weights(facts, parameters, weight_bits, weights)
    known = Model(facts.name if facts else "", per_token, held, count, facts.notes if facts else ())
    card = Card(_times(vram, GB), vram_share, _times(bandwidth, GB), _times(tflops, 1e12), batch)
    load = Load(prompt_tokens, prefill_rate, output_tokens, decode_rate)
    sizing = Sizing.of(known, card, load, tuple(context or _contexts(facts)))
    if sizing.empty:
        raise CliError(
            "Nothing can be worked out from this. Give a MODEL, or --layers, --kv-heads and --head-dim; or --weights "
            "and --bandwidth; or --prompt-tokens, --prefill-rate, --output-tokens and --decode-rate.",
            USAGE,
        )
    if as_json:
        typer.echo(orjson.dumps(sizing.wire(), option=orjson.OPT_INDENT_2))
        return
    size_report(sizing, out())


def _contexts(facts: ModelFacts | None) -> tuple[int, ...]:
    """Usual lengths up to the model's window, and the window."""
    window = facts.window_tokens if facts else None
    if window is None:
        return CONTEXTS
    return (*(tokens for tokens in CONTEXTS if tokens < window), window)


def _weights(
    facts: ModelFacts | None, parameters: float | None, bits: float | None, weights_gb: float | None
) -> tuple[float | None, float | None]:
    """(bytes of the weights, parameters), each None where nothing tells it. What is given wins over the files."""
    count = parameters or (facts.parameters if facts else None)
    if weights_gb is not None:
        return weights_gb * GB, count
    if count is not None and (bits is not None or parameters is not None):
        return weight_bytes(count, bits or 16.0), count
    if bits is not None:
        raise CliError("--weight-bits needs --parameters: the number of weights is not known.", USAGE)
    return (float(facts.weights_bytes) if facts and facts.weights_bytes else None), count


def _together(options: dict[str, object]) -> None:
    missing = [name for name, value in options.items() if value is None]
    if missing and len(missing) < len(options):
        raise CliError(f"{missing[0]} is missing: {', '.join(options)} belong together.", USAGE)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
