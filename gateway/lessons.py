"""What requests and calibrations teach of a replica's speed, until the learner has time for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.calibration import teach
from gateway.calibration_steps import Sample
from latency.learner import SpeedLearner
from latency.speed import SpeedEstimate


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prefill of a user's request, `decoding` others being decoded beside it."""

    uncached_tokens: int
    cached_tokens: int
    seconds: float
    decoding: int

    def teach(self, learner: SpeedLearner) -> None:
        learner.observe_prefill(self.uncached_tokens, self.cached_tokens, self.seconds, decoding=self.decoding)


@dataclass(frozen=True, slots=True)
class Decoded:
    """An answer: so many tokens after the first took so long."""

    output_tokens: int
    seconds: float

    def teach(self, learner: SpeedLearner) -> None:
        learner.observe_decode(self.output_tokens, self.seconds)


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A whole calibration."""

    samples: tuple[Sample, ...]

    def teach(self, learner: SpeedLearner) -> None:
        teach(learner, self.samples)


Lesson = Prefilled | Decoded | Calibrated


def taught(learner: SpeedLearner, lessons: Sequence[Lesson]) -> SpeedEstimate | None:
    """What the learner knows after these. Takes milliseconds: not on the event loop."""
    for lesson in lessons:
        lesson.teach(learner)
    return learner.estimate
