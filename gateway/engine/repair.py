"""Removes torchvision, torchaudio and torchcodec where they do not load: `python -m gateway.engine.repair`.

They come along with vLLM. Beside a CPU build of torch they may fail to import, and transformers, which imports
torchvision when it finds it, fails with them. A text-only engine runs without all three.
"""

import importlib.util
import subprocess
import sys

VISION_PACKAGES = ("torchvision", "torchaudio", "torchcodec")


def vision_is_broken() -> bool:
    """True when torchvision is installed and does not load (it is tried in a process of its own)."""
    if importlib.util.find_spec("torchvision") is None:
        return False
    attempt = subprocess.run(
        [sys.executable, "-c", "import torchvision"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return attempt.returncode != 0


def main() -> int:
    if not vision_is_broken():
        return 0
    print(f"torchvision does not load beside this torch: removing {', '.join(VISION_PACKAGES)}", flush=True)
    uninstall = [sys.executable, "-m", "pip", "uninstall", "--yes", "--quiet", *VISION_PACKAGES]
    return subprocess.run(uninstall, stdin=subprocess.DEVNULL, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
