"""Routes that record what the engine computes, as vLLM has them, in the folder --profile-dir."""

from __future__ import annotations

from datetime import datetime
from http import HTTPStatus
from typing import TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel, Field

from lopa_ascend.serve.http.api_error import ApiError
from lopa_ascend.serve.http.body import Body, Intake, read_body
from lopa_ascend.serve.http.openapi import READING, body_of, errors
from lopa_ascend.serve.link.client import EngineClient
from lopa_ascend.serve.link.messages import PROFILE_NAME, Profiled

MAX_STEPS = 20
"""To write a step takes about a tenth of a second, in which the engine makes none."""

B = TypeVar("B", bound=Body)


class StartProfileRequest(Body):
    """All fields may be left out, and so may the body."""

    instead = {"output_dir": "start the server with --profile-dir"}

    ranks: list[int] = Field(default=[0], min_length=1, description="The ranks that record.")
    delay_steps: int = Field(default=0, ge=0, le=10**6, description="Steps of the engine that are left out first.")
    num_steps: int = Field(
        default=10, ge=1, le=MAX_STEPS, description="Steps after which the profile ends, unless it is stopped before."
    )


class StopProfileRequest(Body):
    """Has no fields, and may be left out."""


class Profile(BaseModel):
    profile: str = Field(description="Name of the folder that the traces go to, in --profile-dir.")
    ranks: list[int]
    delay_steps: int
    num_steps: int


class Traces(BaseModel):
    traces: list[str] = Field(description="What was written, in --profile-dir. Empty: no step was recorded.")


def add_profiling(app: FastAPI, client: EngineClient, intake: Intake) -> None:
    async def fields_of(request: Request, body: type[B]) -> B:
        _check_allowed(client)
        if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
            return body()
        return await intake.take(request, lambda raw: read_body(body, raw))

    statuses = errors(*READING, 404, 409, 500)

    @app.post("/start_profile", responses=statuses, openapi_extra=body_of(StartProfileRequest, required=False))
    async def start_profile(request: Request) -> Profile:
        """Records the next steps of some ranks. One step that is not recorded comes first, to warm the profiler up."""
        asked = await fields_of(request, StartProfileRequest)
        last = client.config.engine.world_size - 1
        if any(not 0 <= rank <= last for rank in asked.ranks):
            message = f"ranks: must be ranks from 0 to {last}, got {asked.ranks}"
            raise ApiError(HTTPStatus.BAD_REQUEST, message, param="ranks")
        name = f"{datetime.now():{PROFILE_NAME}}"
        ranks = sorted({*asked.ranks})
        answer = await client.start_profile(name, ranks, asked.delay_steps, asked.num_steps)
        _check(answer, "end it by POST /stop_profile first")
        return Profile(profile=name, ranks=ranks, delay_steps=asked.delay_steps, num_steps=asked.num_steps)

    @app.post("/stop_profile", responses=statuses, openapi_extra=body_of(StopProfileRequest, required=False))
    async def stop_profile(request: Request) -> Traces:
        """Ends the profile, unless its last step has, and answers once all its ranks have written."""
        await fields_of(request, StopProfileRequest)
        answer = await client.stop_profile()
        _check(answer, "begin one by POST /start_profile")
        return Traces(traces=answer.traces)


def _check_allowed(client: EngineClient) -> None:
    """Raises ApiError, 404, unless the operator has named a folder."""
    config, message = client.config, None
    if config.replicas is not None:
        message = "replicas are not profiled; start one engine, without --replicas, with --profile-dir DIR"
    elif config.engine.profile_dir is None:
        message = "this server records nothing; start it with --profile-dir DIR, a folder for the traces"
    if message is not None:
        raise ApiError(HTTPStatus.NOT_FOUND, message, code="no_profile_dir")


def _check(answer: Profiled, remedy: str) -> None:
    """Raises ApiError if the engine did not do what it was asked."""
    if answer.refusal is not None:
        raise ApiError(HTTPStatus.CONFLICT, f"{answer.refusal}; {remedy}", code="wrong_moment")
    if answer.failures:
        message = f"some ranks could not record: {'; '.join(answer.failures)}"
        raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="engine_error")
