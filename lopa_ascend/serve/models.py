"""Routes about the served models, as clients of OpenAI, Anthropic and SGLang ask for them."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Literal

from fastapi import FastAPI
from pydantic import BaseModel, Field

from lopa_ascend.serve.endpoint import Endpoint
from lopa_ascend.serve.http.openapi import errors


class ModelCard(BaseModel):
    """A model, for clients of OpenAI's API and of Anthropic's."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    created: int
    created_at: datetime
    display_name: str
    owned_by: str = "lopa-ascend"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


class ModelInfo(BaseModel):
    model_path: str = Field(description="Name of the served model; directories of the server are not shown.")
    tokenizer_path: str
    is_generation: Literal[True] = True


def add_models(app: FastAPI, endpoint: Endpoint) -> None:
    now, name = datetime.now(timezone.utc).replace(microsecond=0), endpoint.default.name
    cards = {
        name: ModelCard(
            id=name,
            display_name=name,
            created=int(now.timestamp()),
            created_at=now,
            max_model_len=model.limits.max_model_len,
        )
        for name, model in endpoint.models.items()
    }

    @app.get("/v1/models")
    async def list_models() -> ModelList:
        """The served models."""
        return ModelList(data=[*cards.values()], first_id=name, last_id=[*cards][-1])

    @app.get("/get_model_info")
    async def model_info() -> ModelInfo:
        """The served model, as SGLang's clients ask for it."""
        return ModelInfo(model_path=name, tokenizer_path=name)

    @app.get("/v1/models/{model:path}", responses=errors(404))
    async def retrieve_model(model: str) -> ModelCard:
        """A served model."""
        return cards[endpoint.find(model).name]
