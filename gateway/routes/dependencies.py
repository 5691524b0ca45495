"""What the routes take from a request: who asks, and a bounded JSON body as a wire model."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError

from gateway.context import RequestContext
from gateway.http import read_body
from gateway.wire import from_validation, parse_object

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Largest JSON body and largest uploaded file, in bytes; `timeout_s` bounds each wait for more of a body."""

    max_body_bytes: int
    max_upload_bytes: int
    timeout_s: float


async def request_context(request: Request) -> RequestContext:
    """The context that the door put into the scope."""
    context = request.scope["state"]["context"]
    if not isinstance(context, RequestContext):
        raise TypeError("the request came past the door: its scope holds no RequestContext")
    return context


Context = Annotated[RequestContext, Depends(request_context)]


def json_body(model: type[Model], limits: BodyLimits) -> Callable[[Request], Awaitable[Model]]:
    """A dependency that reads the body itself: the framework would take any size and non-standard JSON.

    It raises ApiError: 400 naming the field, 408, 413.
    """

    async def read(request: Request) -> Model:
        raw = await read_body(request.scope, request.receive, limits.max_body_bytes, limits.timeout_s)
        try:
            return model.model_validate(parse_object(raw or b"{}"))
        except ValidationError as error:
            raise from_validation(error) from None

    return read
