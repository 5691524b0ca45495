"""Numbers as people write them in options: 20k, 8B, 12,000."""

import math
from collections.abc import Callable

from gateway.cli.terminal import USAGE, CliError

_FACTORS = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}


def number(option: str, *, most: float = 1e18) -> Callable[[str], float]:
    """A parser for `option`: a number above 0 and at most `most`. It raises CliError (2) that names the option."""

    def parse(text: str) -> float:
        written = str(text).strip().replace(",", "").replace("_", "").lower()
        factor = _FACTORS.get(written[-1:], 1)
        try:
            value = float(written[:-1] if factor != 1 else written) * factor
        except ValueError:
            raise CliError(f"{option}: '{text}' is not a number (write 12000, 12k or 8B).", USAGE) from None
        if not math.isfinite(value) or not 0 < value <= most:
            raise CliError(f"{option}: {text} is not a number above 0 and at most {most:g}.", USAGE)
        return value

    return parse


def whole(option: str, *, least: int = 1, most: int = 10**12) -> Callable[[str], int]:
    """A parser for `option`: a whole number from `least` to `most`. It raises CliError (2) that names the option."""

    def parse(text: str) -> int:
        if least == 0 and str(text).strip() == "0":
            return 0
        value = number(option)(text)
        if value != int(value) or not least <= value <= most:
            raise CliError(f"{option}: {text} is not a whole number from {least:,} to {most:,}.", USAGE)
        return int(value)

    return parse


def listed(option: str, parse: Callable[[str], int]) -> Callable[[str], tuple[int, ...]]:
    """A parser for numbers separated by commas, each once, in their order."""

    def parse_all(text: str) -> tuple[int, ...]:
        parts = [part for part in str(text).split(",") if part.strip()]
        if not parts:
            raise CliError(f"{option}: no number given.", USAGE)
        return tuple(dict.fromkeys(parse(part) for part in parts))

    return parse_all
