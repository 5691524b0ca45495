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


def taught(
    learner: SpeedLearner, requests: Sequence[Prefilled | Decoded], calibrated: Calibrated | None = None
) -> SpeedEstimate | None:
    """What the learner knows after these. Takes milliseconds: not on the event loop."""
    with learner.at_once():
        for lesson in requests:
            lesson.teach(learner)
    if calibrated is not None:
        calibrated.teach(learner)
    return learner.estimate
