"""The recipe's `track` section."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from compressx.recipe.validation import Strict

Tracker: TypeAlias = Literal["mlflow", "tensorboard", "trackio", "wandb"]


class Track(Strict):
    """Experiment trackers that follow a run."""

    to: list[Tracker] = Field(min_length=1, description="the trackers", examples=[["wandb"]])
    project: str = Field("compressx", min_length=1, description="project, or experiment of MLflow")


def _track_from_text(value: object) -> object:
    if isinstance(value, str):
        return {"to": [value]}
    return {"to": value} if isinstance(value, list) else value


TrackField = Annotated[Track, BeforeValidator(_track_from_text, json_schema_input_type=Tracker | list[Tracker] | Track)]
