"""How the embedded engine is called: flags and environment, as pure functions of values."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway.engine.prepare import MODEL_NAME


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What may differ between two embedded engines.

    `kv_cache_gib` of 1 holds 46,592 tokens of the packaged model. `enforce_eager` starts in 30 to 60 s instead of
    about 130 s, and costs a little speed. `dev_mode` opens `POST /reset_prefix_cache`: for tests, never for users.
    """

    port: int = 8000
    host: str = "127.0.0.1"
    max_model_len: int = 8192
    block_size: int = 32
    kv_cache_gib: int = 1
    enforce_eager: bool = True
    dev_mode: bool = False
    extra_arguments: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Base URL, without `/v1`."""
        return f"http://{self.host}:{self.port}"


def engine_command(model_dir: Path, options: EngineOptions) -> list[str]:
    """The server runs as a module: the `vllm` command of the CPU wheel looks for a distribution that is not there."""
    command = [
        *(sys.executable, "-W", "ignore::DeprecationWarning", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model_dir), "--served-model-name", MODEL_NAME),
        *("--host", options.host, "--port", str(options.port)),
        *("--dtype", "bfloat16"),
        *("--max-model-len", str(options.max_model_len)),
        *("--block-size", str(options.block_size)),
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--enable-per-request-metrics",
        # Left to sample at will, so small a model talks nonsense; a request that gives a temperature gets it.
        *("--override-generation-config", '{"temperature": 0}'),
        *("--uvicorn-log-level", "warning"),
    ]
    if options.enforce_eager:
        command.append("--enforce-eager")
    return [*command, *options.extra_arguments]


def engine_environment(
    base: Mapping[str, str], options: EngineOptions, cores: Iterable[int], prefix: Path
) -> dict[str, str]:
    """`base` with what makes the engine fast and silent.

    `cores` are the numbers of the CPUs that it may use: by default vLLM leaves one of them to its server, which
    halves the prefill speed of a small machine. `prefix` is that of the Python environment: its Intel OpenMP library,
    preloaded, makes decode a third faster.
    """
    environment = {
        **base,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(options.kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": core_ranges(cores),
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_LOGGING_COLOR": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if options.dev_mode:
        environment["VLLM_SERVER_DEV_MODE"] = "1"
    openmp = prefix / "lib" / "libiomp5.so"
    if openmp.exists():
        environment["LD_PRELOAD"] = ":".join(filter(None, (str(openmp), base.get("LD_PRELOAD", ""))))
    return environment


def core_ranges(cores: Iterable[int]) -> str:
    """`{0, 1, 2, 5}` as `0-2,5`."""
    ranges: list[tuple[int, int]] = []
    for core in sorted(set(cores)):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], core)
        else:
            ranges.append((core, core))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
