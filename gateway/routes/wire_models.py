"""Models on the wire."""

from typing import Literal

from pydantic import BaseModel


class ModelObject(BaseModel):
    """`created` is 0 for the engine's own models: engines report the time of the request, which says nothing."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "headstart"


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelObject]
