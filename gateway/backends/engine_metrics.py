"""What an engine's Prometheus text tells of it; None where it does not tell."""

import re

_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_STARTED = re.compile(r"^process_start_time_seconds ([\d.e+]+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read_cache_config(metrics: str) -> tuple[int | None, int | None]:
    """(block size in tokens, number of blocks) from the engine's Prometheus text."""
    line = _CACHE_CONFIG.search(metrics)
    labels = dict(_LABEL.findall(line.group(1))) if line else {}
    return _int(labels.get("block_size")), _int(labels.get("num_gpu_blocks"))


def read_prefix_caching(metrics: str) -> bool | None:
    """Whether the engine reuses prefixes, from its Prometheus text; None where it does not tell."""
    line = _CACHE_CONFIG.search(metrics)
    told = dict(_LABEL.findall(line.group(1))).get("enable_prefix_caching") if line else None
    return {"True": True, "False": False}.get(told or "")


def read_started(metrics: str) -> float | None:
    """When the engine's process began, from its Prometheus text; None where it does not tell."""
    line = _STARTED.search(metrics)
    try:
        return float(line.group(1)) if line else None
    except ValueError:
        return None


def _int(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
