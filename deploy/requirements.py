"""Prints requirements of pyproject.toml, one a line, for layers of the image that the code does not change.

python deploy/requirements.py torch              torch's pin alone: it is installed first
python deploy/requirements.py EXTRA[,EXTRA]      those of the extras
python deploy/requirements.py project [EXTRAS]   the project's own, and those of the extras
"""

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, names: list[str]) -> list[str]:
    """Raises KeyError for an extra that there is not."""
    project = tomllib.loads(pyproject.read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    if names == ["torch"]:
        return [line for line in extras["engine"] if line.startswith("torch==")]
    sources = {"project": project["dependencies"], **extras}
    wanted = [name for group in names for name in group.split(",") if name]
    return [line for name in wanted for line in sources[name]]


if __name__ == "__main__":
    print("\n".join(requirements(Path("pyproject.toml"), sys.argv[1:])))
