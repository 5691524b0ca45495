"""What a model's `config.json` says of the size of its KV cache, and its folder of the size of its weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gateway.cli.terminal import USAGE, CliError, printable
from latency.sizing import KvShape

CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_MAX_CONFIG_BYTES = 16 * 2**20
_INSTEAD = "Give --kv-bytes-per-token instead, from the engine's log."

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = ("num_attention_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_STATE_LAYERS = ("mamba", "recurrent", "conv", "linear_attention", "rwkv")
_BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16, "float8_e4m3fn": 8, "int8": 8}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`shape` is None where it was not asked for, `window_tokens` and `weights_bytes` where nothing tells them.

    `parameters` come from the weights' bytes and number type, None for weights that are already quantised. `notes`
    say what the reader must know.
    """

    name: str
    shape: KvShape | None
    window_tokens: int | None
    weights_bytes: int | None
    parameters: float | None
    notes: tuple[str, ...]


def read_model(path: Path, bytes_per_value: float, *, reads_shape: bool = True) -> ModelFacts:
    """From a model's folder, or its `config.json`. Raises CliError (2) for what is not there or not supported."""
    file = path / CONFIG if path.is_dir() else path
    try:
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise CliError(f"MODEL: '{file}' is too large for a {CONFIG}.", USAGE)
        config = orjson.loads(file.read_bytes())
    except FileNotFoundError:
        raise CliError(f"MODEL: no file '{file}'. Name a model's folder or its {CONFIG}.", USAGE) from None
    except OSError as error:
        raise CliError(f"MODEL: '{file}' cannot be read: {error.strerror}.", USAGE) from error
    except orjson.JSONDecodeError as error:
        raise CliError(f"MODEL: '{file}' is not JSON: {error.msg}.", USAGE) from None
    if not isinstance(config, dict):
        raise CliError(f"MODEL: '{file}' holds no JSON object.", USAGE)
    text = _text_part(config)
    weights = _weights_bytes(file.parent)
    window = text.get("max_position_embeddings")
    return ModelFacts(
        name=printable(str(config.get("_name_or_path") or file.resolve().parent.name)),
        shape=kv_shape(text, bytes_per_value) if reads_shape else None,
        window_tokens=window if _is_count(window) else None,
        weights_bytes=weights,
        parameters=_parameters(config, text, weights),
        notes=notes(text) if reads_shape else (),
    )


def kv_shape(config: Mapping[str, Any], bytes_per_value: float) -> KvShape:
    """Raises CliError (2) where 2 · layers · kv_heads · head_dim is not what the model keeps, and names why."""
    if "kv_lora_rank" in config:
        raise CliError(
            f"MODEL: it keeps a compressed latent (MLA, kv_lora_rank) instead of keys and values. {_INSTEAD}", USAGE
        )
    if config.get("is_encoder_decoder"):
        raise CliError(f"MODEL: encoder-decoder models are not supported. {_INSTEAD}", USAGE)
    kinds = _layer_kinds(config)
    if any(kind for kind in kinds if any(state in kind for state in _STATE_LAYERS)) or _mixes_states(config):
        raise CliError(
            f"MODEL: some of its layers keep a state of fixed size instead of keys and values. {_INSTEAD}", USAGE
        )
    layers = _count(config, _LAYERS)
    heads = _count(config, _HEADS)
    if config.get("multi_query") is True and not any(key in config for key in _KV_HEADS):
        kv_heads = 1
    else:
        kv_heads = _count(config, _KV_HEADS, missing=heads)
    head_dim = config.get("head_dim")
    if head_dim is None:
        width = _count(config, _WIDTH)
        if width % heads:
            raise CliError(f"MODEL: no head_dim, and {width} numbers are not shared evenly by {heads} heads.", USAGE)
        head_dim = width // heads
    if not _is_count(head_dim):
        raise CliError(f"MODEL: head_dim is {head_dim!r}, not a whole number above 0.", USAGE)
    return KvShape(layers, kv_heads, head_dim, bytes_per_value)


def notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What makes the formula an upper bound for this model."""
    said = []
    window = config.get("sliding_window")
    kinds = _layer_kinds(config)
    windowed = sum("sliding" in kind or "chunked" in kind for kind in kinds)
    if not kinds and _is_count(window) and config.get("use_sliding_window", True):
        windowed = -1
    if windowed:
        which = "its layers" if windowed < 0 else f"{windowed} of {len(kinds)} layers"
        size = f"the last {window:,} tokens" if _is_count(window) else "a window of tokens"
        said.append(f"Sliding window: {which} keep {size} only, so the KV cache is at most what stands here.")
    if config.get("num_kv_shared_layers"):
        said.append("Some layers share keys and values, so the KV cache is at most what stands here.")
    if any(key in config for key in ("num_local_experts", "num_experts", "n_routed_experts")):
        said.append(
            "Mixture of experts: a token reads and computes only the active ones; rates here are lower bounds."
        )
    return tuple(said)


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A model of several media holds its language model in `text_config`."""
    for outer in (config, config.get("thinker_config")):
        nested = outer.get("text_config") if isinstance(outer, dict) else None
        if isinstance(nested, dict):
            return nested
    return config


def _layer_kinds(config: Mapping[str, Any]) -> Sequence[str]:
    kinds = config.get("layer_types") or config.get("layers_block_type") or ()
    return [str(kind) for kind in kinds] if isinstance(kinds, list) else ()


def _mixes_states(config: Mapping[str, Any]) -> bool:
    named = str(config.get("model_type", ""))
    return any(state in named for state in ("mamba", "rwkv")) or any(
        key in config for key in ("full_attention_interval", "attn_layer_period", "hybrid_override_pattern")
    )


def _count(config: Mapping[str, Any], keys: Sequence[str], missing: int | None = None) -> int:
    value = next((config[key] for key in keys if config.get(key) is not None), missing)
    if value is None:
        raise CliError(
            f"MODEL: the configuration has no {keys[0]}. Give --layers, --kv-heads and --head-dim instead.", USAGE
        )
    if not _is_count(value):
        raise CliError(f"MODEL: {keys[0]} is {value!r}, not a whole number above 0.", USAGE)
    return int(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _weights_bytes(folder: Path) -> int | None:
    """The size of the safetensors files; None where there are none."""
    files = [file for file in folder.glob("*.safetensors") if file.is_file()]
    if files:
        return sum(file.stat().st_size for file in files)
    try:
        total = orjson.loads((folder / _INDEX).read_bytes())["metadata"]["total_size"]
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        return None  # a folder need not hold weights: the options give them
    return int(total) if _is_count(total) else None


def _parameters(config: Mapping[str, Any], text: Mapping[str, Any], weights: int | None) -> float | None:
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    bits = _BITS.get(str(dtype))
    if weights is None or bits is None or "quantization_config" in config:
        return None
    return weights * 8 / bits
