"""When a replica is given requests, and when it is left alone."""

from gateway.health import FIRST_PAUSE_S, MOST_FAULTS, Health


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def met(clock: Clock) -> Health:
    health = Health(clock)
    health.probed(None)
    return health


def test_an_engine_that_is_met_for_the_first_time_takes_requests_at_once() -> None:
    health = Health(Clock())
    assert not health.takes_requests
    health.probed(None)
    assert health.takes_requests
    assert health.state == "ok"


def test_the_first_failed_request_ends_the_flow() -> None:
    health = met(Clock())
    health.failed("gone")
    assert not health.takes_requests
    assert health.error == "gone"


def test_after_a_failed_request_an_answered_probe_lets_one_request_try() -> None:
    clock = Clock()
    health = met(clock)
    health.failed("gone")
    health.probed(None)
    assert not health.takes_requests, "the pause is not over"
    clock.now_s = FIRST_PAUSE_S
    health.probed(None)
    assert health.state == "half_open"
    assert health.takes_requests
    health.began()
    assert not health.takes_requests, "one tries, the others stay away"
    health.succeeded()
    assert health.state == "ok"
    assert health.takes_requests


def test_a_try_whose_client_leaves_makes_room_for_another() -> None:
    clock = Clock()
    health = met(clock)
    health.failed("gone")
    clock.now_s = FIRST_PAUSE_S
    health.probed(None)
    health.left(health.began())
    assert health.takes_requests


def test_a_request_from_before_the_failure_ends_no_trial() -> None:
    clock = Clock()
    health = met(clock)
    before = health.began()
    health.failed("gone")
    clock.now_s = FIRST_PAUSE_S
    health.probed(None)
    health.began()
    health.left(before)
    assert not health.takes_requests


def test_each_failed_try_doubles_the_pause_up_to_its_bound_and_success_forgets_it() -> None:
    clock = Clock()
    health = met(clock)
    pauses = []
    for _ in range(8):
        health.failed("gone")
        pauses.append(health.pause_s)
        clock.now_s += health.pause_s
        health.probed(None)
        assert health.takes_requests
        health.began()
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    health.succeeded()
    assert health.pause_s == FIRST_PAUSE_S


def test_an_engine_that_misses_a_probe_only_is_back_with_the_next_one() -> None:
    health = met(Clock())
    health.probed("no answer within 5 s")
    assert not health.takes_requests
    health.probed(None)
    assert health.state == "ok"


def test_server_errors_in_a_row_end_the_flow_and_a_success_between_does_not() -> None:
    health = met(Clock())
    for _ in range(MOST_FAULTS - 1):
        health.faulted("500")
    health.succeeded()
    for _ in range(MOST_FAULTS - 1):
        health.faulted("500")
    assert health.takes_requests
    health.faulted("500")
    assert not health.takes_requests
