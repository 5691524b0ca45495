"""What a learner keeps across restarts: one line that identifies and checks it, then JSON."""

import math
import zlib
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

MAGIC = b"headstart-speed-1"

Tokens = Annotated[int, Field(ge=0, le=2**31)]
Number = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, lt=math.inf, allow_inf_nan=False)]
Coefficient = Annotated[float, Field(ge=0, lt=math.inf, allow_inf_nan=False)]


def _some_time(coefficients: tuple[float, float, float]) -> tuple[float, float, float]:
    if not any(coefficients):
        raise ValueError("a prefill takes some time")
    return coefficients


Coefficients = tuple[Coefficient, Coefficient, Coefficient]
ModelCoefficients = Annotated[Coefficients, AfterValidator(_some_time)]
Sample = tuple[Tokens, Tokens, Seconds, Number, Number]
Error = tuple[Seconds, Seconds, Number]


class CorruptSpeed(Exception):
    """The bytes are truncated, damaged, or not what a learner of this version dumped."""


class KeptSpeed(BaseModel):
    """The wire form. Samples are (uncached, cached, seconds, number, decoding), errors (predicted, ratio, number)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    observed: Number
    model: ModelCoefficients | None
    anchor: ModelCoefficients | None
    samples: Annotated[tuple[Sample, ...], Field(max_length=1000)]
    errors: Annotated[tuple[Error, ...], Field(max_length=1000)]
    beside: Coefficients | None
    beside_samples: Annotated[tuple[Sample, ...], Field(max_length=1000)]
    beside_errors: Annotated[tuple[Error, ...], Field(max_length=1000)]
    token_seconds: Annotated[tuple[Seconds, ...], Field(max_length=1000)]


def written(state: KeptSpeed) -> bytes:
    body = state.model_dump_json().encode()
    return b"%s %08x %d\n%s" % (MAGIC, zlib.crc32(body), len(body), body)


def read(raw: bytes) -> KeptSpeed:
    """Raises CorruptSpeed."""
    head, _, body = raw.partition(b"\n")
    if head != b"%s %08x %d" % (MAGIC, zlib.crc32(body), len(body)):
        raise CorruptSpeed("not a kept speed, or damaged")
    try:
        return KeptSpeed.model_validate_json(body)
    except ValidationError as error:
        raise CorruptSpeed(f"a kept speed with {error.error_count()} impossible values") from error
