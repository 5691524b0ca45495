"""What a learner keeps across restarts, and what it does with bytes that are not that."""

import random
import zlib

import pytest

from latency.kept import MAGIC
from latency.learner import CorruptSpeed, SpeedLearner
from latency.model import CPU_135M
from tests.support.speeds import mean_error, serve, times_slower


def taught(requests: int = 60) -> SpeedLearner:
    learner, rng = SpeedLearner(), random.Random(1)
    serve(learner, requests, rng)
    for number in range(40):
        learner.observe_prefill(100 + number, 0, 0.2, decoding=1 + number % 3)
        learner.observe_decode(50, 1.25 + number / 100)
    return learner


def sealed(body: bytes) -> bytes:
    return b"%s %08x %d\n%s" % (MAGIC, zlib.crc32(body), len(body), body)


def test_a_loaded_learner_says_what_the_dumped_one_said() -> None:
    learner = taught()
    before, after = learner.estimate, SpeedLearner.load(learner.dump(), 0.95).estimate
    assert before is not None
    assert after is not None
    assert after.source == "kept"
    assert (after.prefill, after.factor, after.samples) == (before.prefill, before.factor, before.samples)
    assert (after.token_s, after.safe_token_s, after.beside) == (before.token_s, before.safe_token_s, before.beside)
    assert after.size_factors == before.size_factors


def test_a_loaded_learner_dumps_the_same_bytes_and_learns_the_same() -> None:
    learner = taught()
    loaded = SpeedLearner.load(learner.dump(), 0.95)
    assert loaded.dump() == learner.dump()
    serve(learner, 100, random.Random(2))
    serve(loaded, 100, random.Random(2))
    assert loaded.dump() == learner.dump()


def test_the_quantile_is_that_of_the_load() -> None:
    raw = taught(400).dump()
    narrow, wide = (SpeedLearner.load(raw, quantile).estimate for quantile in (0.6, 0.98))
    assert narrow is not None
    assert wide is not None
    assert narrow.factor < wide.factor
    assert wide.quantile == 0.98


def test_requests_after_a_load_make_it_learned() -> None:
    loaded = SpeedLearner.load(taught().dump(), 0.95)
    serve(loaded, 21, random.Random(3))
    assert loaded.estimate is not None
    assert loaded.estimate.source == "learned"


def test_an_empty_learner_is_kept_too() -> None:
    assert SpeedLearner.load(SpeedLearner().dump(), 0.95).estimate is None


def test_a_kept_speed_of_a_faster_machine_is_noticed_within_thirty_requests() -> None:
    loaded, rng = SpeedLearner.load(taught(300).dump(), 0.95), random.Random(4)
    slower = times_slower(CPU_135M, 1.6)
    assert any(one.drifting for one in serve(loaded, 30, rng, slower))
    assert mean_error(serve(loaded, 50, rng, slower)) < 0.07


def test_every_truncation_is_named() -> None:
    raw = taught(10).dump()
    for length in range(len(raw)):
        with pytest.raises(CorruptSpeed):
            SpeedLearner.load(raw[:length], 0.95)


def test_a_flipped_bit_anywhere_is_named() -> None:
    raw = taught(10).dump()
    for position in range(len(raw)):
        flipped = raw[:position] + bytes([raw[position] ^ 1 << position % 8]) + raw[position + 1 :]
        with pytest.raises(CorruptSpeed):
            SpeedLearner.load(flipped, 0.95)


@pytest.mark.parametrize(
    ("part", "other"),
    [
        (b'"observed":', b'"other":1,"observed":'),
        (b'"model":[', b'"model":[-'),
        (b'"model":[', b'"model":[1e999,'),
        (b'"samples":[[', b'"samples":[[-'),
        (b'"errors":[[', b'"errors":[[0,1,1],['),
        (b'"token_seconds":[', b'"token_seconds":["x",'),
    ],
)
def test_well_formed_bytes_with_impossible_values_are_named(part: bytes, other: bytes) -> None:
    body = taught().dump().partition(b"\n")[2]
    assert part in body
    with pytest.raises(CorruptSpeed, match="impossible"):
        SpeedLearner.load(sealed(body.replace(part, other, 1)), 0.95)


def test_a_model_in_which_nothing_takes_time_is_named() -> None:
    body = b'"model":[0,0,0]'.join(SpeedLearner().dump().partition(b"\n")[2].split(b'"model":null'))
    with pytest.raises(CorruptSpeed, match="impossible"):
        SpeedLearner.load(sealed(body), 0.95)


@pytest.mark.parametrize("raw", [b"", b"\n", b"{}", b"headstart-speed-2 00000000 0\n", MAGIC, b"\x80\x04K\x01."])
def test_foreign_bytes_are_named(raw: bytes) -> None:
    with pytest.raises(CorruptSpeed):
        SpeedLearner.load(raw, 0.95)


def test_a_dump_stays_small() -> None:
    learner, rng = SpeedLearner(), random.Random(5)
    for _ in range(5_000):
        u, c = rng.randrange(1, 2 ** rng.randrange(5, 16)), rng.randrange(2 ** rng.randrange(1, 16))
        learner.observe_prefill(
            u, c, CPU_135M.predict_s(u, c) * rng.uniform(0.9, 1.1), decoding=rng.choice((0, 0, 2))
        )
    assert len(learner.dump()) < 120_000
