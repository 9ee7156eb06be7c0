"""The recipe's `evaluate` section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Discriminator, Field, StrictBool, StrictInt, Tag, model_validator

from compressx.recipe.document import Step
from compressx.recipe.sources import Bos, DatasetField, DatasetSource
from compressx.recipe.validation import Strict, conflict

FIGURES = ("token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "needle", "sample")
"""Names under which an evaluation reports what is not the figures of one text or task, which need other names."""


class TokenPerplexity(Strict):
    """exp of the mean negative log-likelihood per token over fixed, non-overlapping windows."""

    dataset: DatasetField | None = Field(None, description="text to measure on; this or datasets")
    datasets: dict[str, DatasetField] | None = Field(
        None,
        min_length=1,
        description="several texts, each measured by itself, by their names in the report",
        examples=[{"prose": "wikitext", "code": {"text": "code.txt"}}],
    )
    sequence_length: StrictInt = Field(2048, ge=2, description="tokens in a window")
    samples: StrictInt | None = Field(
        None, ge=1, description="number of windows of each text, from the first; all when absent"
    )
    bos: Bos = Field("auto", description="begin each window with the tokenizer's BOS token; auto: for Gemma only")
    batch_size: StrictInt = Field(4, ge=1, description="windows per forward pass")

    @model_validator(mode="after")
    def _one_or_several(self) -> TokenPerplexity:
        if (self.dataset is None) == (self.datasets is None):
            given = "both" if self.dataset else "neither"
            raise conflict(
                f"expected either dataset or datasets, got {given}; datasets measures each text by itself", []
            )
        if taken := sorted({"", *FIGURES} & {*(self.datasets or ())}):
            raise conflict(f"a text cannot be named {taken[0]!r}; choose another name", ["datasets"])
        return self

    @property
    def texts(self) -> dict[str, DatasetSource]:
        """The texts by name; the name of a single one is empty."""
        return self.datasets or ({} if self.dataset is None else {"": self.dataset})


class RollingTask(Strict):
    """A dataset as an lm-eval `loglikelihood_rolling` task."""

    name: str = Field(min_length=1, description="its name in the report")
    dataset: DatasetField


def _kind_of_task(value: object) -> str | None:
    if isinstance(value, str):
        return "<name>"
    return "<dataset>" if isinstance(value, Mapping | RollingTask) else None


TaskField = Annotated[
    Annotated[str, Tag("<name>")] | Annotated[RollingTask, Tag("<dataset>")],
    Discriminator(
        _kind_of_task,
        custom_error_type="task",
        custom_error_message="the name of an lm-eval task, the path of a task YAML, or {name, dataset}",
    ),
]


class LmEval(Strict):
    """Tasks of lm-evaluation-harness: by name, by path of a task YAML, or from a dataset."""

    tasks: list[TaskField] = Field(min_length=1, examples=[["wikitext"]])
    trust_task_code: StrictBool = Field(
        False, description="run Python code that task files bring; only if you trust it"
    )
    limit: StrictInt | None = Field(None, ge=1, description="documents per task; all when absent")
    num_fewshot: StrictInt | None = Field(
        None, ge=0, description="solved examples before each question; as each task says when absent"
    )
    apply_chat_template: StrictBool | Annotated[str, Field(min_length=1)] = Field(
        False,
        description="prompt through the tokenizer's chat template; a text is the name of one of several templates",
    )
    fewshot_as_multiturn: StrictBool | None = Field(
        None, description="examples as turns of a conversation; true with apply_chat_template when absent"
    )
    seeds: list[Annotated[StrictInt, Field(ge=0, lt=2**32)]] | None = Field(
        None, min_length=1, description="of the draw of examples; figures are means over them. 1234 when absent",
        examples=[[1, 2, 3]],
    )  # fmt: skip
    batch_size: Literal["auto"] | Annotated[StrictInt, Field(ge=1)] = Field(
        4, description="requests per forward pass; auto: as many as the GPU's memory holds, 4 on the CPU"
    )

    @model_validator(mode="after")
    def _refuse_without_effect(self) -> LmEval:
        if self.fewshot_as_multiturn and not self.apply_chat_template:
            raise conflict(
                "fewshot_as_multiturn: true needs apply_chat_template: true, because turns are written by the chat "
                "template; set it, or remove fewshot_as_multiturn",
                ["fewshot_as_multiturn"],
            )
        if self.seeds is not None and len({*self.seeds}) < len(self.seeds):
            raise conflict(
                f"seeds are {self.seeds}; expected each once, since equal seeds give equal figures", ["seeds"]
            )
        own = [task.name for task in self.tasks if isinstance(task, RollingTask)]
        if own and (given := [n for n in ("num_fewshot", "apply_chat_template", "seeds") if getattr(self, n)]):
            raise conflict(
                f"{' and '.join(given)} cannot apply to the task {own[0]!r}, which is a dataset: its documents are "
                "scored as they are, without questions; remove the key, or measure the dataset by token_perplexity",
                given,
            )
        return self


class Sample(Strict):
    """What each model writes after the same prompt, the likeliest token each time."""

    prompt: str = Field(min_length=1, examples=["The three laws of motion are"])
    tokens: StrictInt = Field(64, ge=1, description="written at most; fewer where the model ends its text")
    apply_chat_template: StrictBool = Field(False, description="give the prompt as a user's message")


class NeedleGrid(Strict):
    """Sentences hidden in other text, and whether a model answers a question about each."""

    dataset: DatasetField = Field(description="the other text", examples=["wikitext"])
    lengths: list[StrictInt] = Field([1024, 2048, 4096], min_length=1, description="tokens of a prompt")
    depths: StrictInt = Field(9, ge=1, description="places of the sentence, evenly spaced from beginning to end")
    needles: StrictInt = Field(5, ge=1, le=5, description="different sentences at each length and depth")
    tokens: StrictInt = Field(16, ge=1, description="of an answer, at most")

    @model_validator(mode="after")
    def _different_lengths(self) -> NeedleGrid:
        if len({*self.lengths}) < len(self.lengths) or min(self.lengths) < 64:
            raise conflict(f"lengths are {self.lengths}; expected different ones, of 64 or more", ["lengths"])
        return self


class Evaluate(Strict):
    """What is measured on the dense and on the pruned model; nothing without this section."""

    token_perplexity: TokenPerplexity | None = Field(None, examples=[{"dataset": "wikitext"}])
    lm_eval: LmEval | None = Field(None, examples=[{"tasks": ["wikitext"]}])
    needle: NeedleGrid | None = Field(
        None,
        description="whether sentences hidden in long prompts are found; with select_tokens, also by its tokens alone",
        examples=[{"dataset": "wikitext"}],
    )
    sample: Sample | None = Field(None, description="text written by each model, to read side by side")

    @model_validator(mode="after")
    def _foreign_text(self) -> Evaluate:
        if any(dataset.generate is not None for dataset in self.datasets().values()):
            raise conflict(
                "generate only goes with calibration and finetune: a model's own text does not measure it; name a "
                "dataset",
                [],
            )
        return self

    def datasets(self) -> dict[tuple[Step, ...], DatasetSource]:
        """Return the datasets by their location in this section."""
        found: dict[tuple[Step, ...], DatasetSource] = {}
        if self.token_perplexity is not None:
            for name, source in self.token_perplexity.texts.items():
                place = ("datasets", name) if name else ("dataset",)
                found[("token_perplexity", *place)] = source
        if self.needle is not None:
            found["needle", "dataset"] = self.needle.dataset
        for i, task in enumerate(self.lm_eval.tasks if self.lm_eval is not None else ()):
            if isinstance(task, RollingTask):
                found["lm_eval", "tasks", i, "dataset"] = task.dataset
        return found
