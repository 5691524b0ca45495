"""Who may start now. A slot is held from admission to the last byte and always comes back."""

from types import TracebackType

from gateway.errors import ApiError, ErrorKind


class Admission:
    """Around a request: at most `max_in_flight` at a time; one more is refused at once, with Retry-After."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self.in_flight = 0

    def __enter__(self) -> None:
        """Raises ApiError (503)."""
        if self.in_flight >= self._max_in_flight:
            raise ApiError(
                ErrorKind.UNAVAILABLE,
                f"{self._max_in_flight} requests are in progress, the most that this gateway takes. Try again later.",
                code="gateway_busy",
                retry_after_s=1.0,
            )
        self.in_flight += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.in_flight -= 1
