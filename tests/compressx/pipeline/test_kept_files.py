"""What stands in a model's folder stands in the output's: in memory and streamed, tensor by tensor and byte by byte."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from tests.compressx.foreign import save_foreign
from tests.compressx.pipeline.runs import MAGNITUDE
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.trainers import BpeTrainer

from compressx.evaluation.saved import apply_masks, source_of
from compressx.models.checkpoint import Checkpoint, find_checkpoint, keep_settings
from compressx.models.loading import load_tokenizer
from compressx.pipeline.run import plan, run
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import ArtifactError
from compressx.testing import TINY_CONFIGS, save_tiny_model

NEURONS = {"targets": ["*.mlp.*"], "pattern": "neurons"}
KEPT = {
    "preprocessor_config.json": '{"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32}}',
    "processor_config.json": '{ "image_seq_length": 4}',
    "chat_template.jinja": "{{ messages[0].content }}\n",
    "tokenizer.model": "\nno real pieces",
    "special_tokens_map.json": "{}",
    "LICENSE": "as it was",
    # transformers 5.16 does not save it, since nothing is sampled.
    "generation_config.json": '{"eos_token_id": 2, "temperature": 0.9,\n\n"top_p": 0.6}',
}
DROPPED = ("training_args.bin", "pytorch_model.bin.index.json", "params.json", ".hidden.json", "weights.json.pt")


def dressed(folder: Path, copy: Path) -> Path:
    """Copy a model's folder, and add what is published with models."""
    shutil.copytree(folder, copy)
    for name, text in {**KEPT, **dict.fromkeys(DROPPED, "x"), "README.md": "theirs"}.items():
        (copy / name).write_text(text)
    (copy / "figures").mkdir()
    return copy


def stored(folder: Path) -> dict[str, tuple[torch.dtype, bytes]]:
    """Return the dtype and bytes of each tensor in all weight files of a folder."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                assert name not in found, f"{name} is stored twice"
                tensor = file.get_tensor(name)
                found[name] = (tensor.dtype, tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found


def others(folder: Path) -> dict[str, bytes]:
    """Return every file that holds no weights, and not the card, which names the recipe."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and ".safetensors" not in p.name]
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files if p.name != "README.md"}


def both(source: Path, trust: bool = False) -> Path:
    """Run in memory and streamed, which gives the same files, and return the folder of the first model."""
    for streaming in (False, True):
        model = {"path": str(source), "streaming": streaming, "trust_remote_code": trust}
        run({"model": model, "prune": [MAGNITUDE], "output": f"out-{streaming}"})
    whole, streamed = (Path(f"out-{streaming}/model") for streaming in (False, True))
    assert stored(whole) == stored(streamed)
    assert others(whole) == others(streamed)
    return whole


@pytest.mark.parametrize("architecture", TINY_CONFIGS)
def test_in_memory_and_streamed_give_the_same_files_with_all_that_stood_beside_the_weights(
    architecture, models, project
):
    source = dressed(models(architecture), project / "model")
    whole = both(source)
    for name, text in KEPT.items():
        assert (whole / name).read_text() == text
    assert not {*others(whole)} & {*DROPPED}
    assert stored(source).keys() == stored(whole).keys()
    if architecture != "llama":
        return
    apply_masks(Path("out-False/masks.safetensors"), source_of(str(source)), Path("applied"))
    assert {**others(Path("applied/model")), "config.json": b""} == {**others(whole), "config.json": b""}
    run({"model": {"path": str(source)}, "output": "out", "shrink": True, "prune": [MAGNITUDE | NEURONS]})
    for name, text in KEPT.items():
        assert (Path("out/model") / name).read_text() == text
    copied, left = (
        [line for line in Path("out-False/run.log").read_text().splitlines() if f"INFO model: {what}" in line]
        for what in ("copied", "left out")
    )
    assert len(copied) == len(left) == 1, "each stands once in the log"
    assert "'preprocessor_config.json'" in copied[0]
    assert f"left out 'figures', 'training_args.bin', 'weights.json.pt' of {source}" in left[0]


def test_a_model_with_images_still_has_its_image_processor(project: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration
    from transformers.image_processing_base import ImageProcessingMixin

    save_tiny_model(project / "model", "gemma3")
    text = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
              "image_size": 32, "patch_size": 8}  # fmt: skip
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=120)
    Gemma3ForConditionalGeneration(config).save_pretrained(project / "model")
    (project / "model/preprocessor_config.json").write_text(KEPT["preprocessor_config.json"])
    found, _ = ImageProcessingMixin.get_image_processor_dict(str(both(project / "model")))
    assert found["image_processor_type"] == "Gemma3ImageProcessor"


def test_a_model_with_python_code_of_its_own_keeps_it_in_memory_streamed_and_shrunk(project: Path) -> None:
    source = save_foreign(project / "model")
    both(source, trust=True)
    rule = {"targets": ["*"], "pruner": "depth", "sparsity": 0.4, "pattern": "blocks"}
    model = {"path": str(source), "trust_remote_code": True}
    text = {"dataset": {"text": str(source.with_name("text.txt"))}, "samples": 4, "sequence_length": 16}
    run({"model": model, "output": "out", "shrink": True, "prune": [rule], "calibration": text})
    for code in source.glob("*.py"):
        for folder in ("out-False", "out-True", "out"):
            assert Path(folder, "model", code.name).read_text() == code.read_text()


def test_where_nothing_is_left_out_the_log_does_not_speak_of_it(models: Any) -> None:
    both(models("llama"))
    (said,) = [x for x in Path("out-False/run.log").read_text().splitlines() if "INFO model:" in x]
    copied = "'generation_config.json', 'tokenizer.json', 'tokenizer_config.json'"
    assert f"copied {copied} of {models('llama')}" in said


def test_links_lead_to_the_blobs_of_the_hub_and_nowhere_else_out_of_the_folder(project: Path) -> None:
    """Not even to blobs from a folder of one's own; and nothing beside a GGUF file is copied."""
    source, kept = project / "models--a--b/snapshots/abc", project / "kept"
    for folder in (source, kept, project / "models--a--b/blobs"):
        folder.mkdir(parents=True)
    (project / "secret").write_text("secret")
    (project / "models--a--b/blobs/1").write_text("blob")
    for name, to in {"LICENSE": "../../blobs/1", "notes.txt": "../../../secret", "up.json": "../../blobs/../../secret",
                     "all.json": str(project / "secret"), "gone.json": "nowhere"}.items():  # fmt: skip
        (source / name).symlink_to(to)
    os.mkfifo(source / "pipe.json")
    with (source / "large.txt").open("wb") as file:
        file.truncate(2**27)
    copied, left = keep_settings(Checkpoint(str(source)), kept)
    assert copied == ["LICENSE"]
    assert left == ["all.json", "gone.json", "large.txt", "notes.txt", "pipe.json", "up.json"]
    assert [p.name for p in kept.iterdir()] == ["LICENSE"]
    for folder in ("blobs", "my/model"):
        (project / folder).mkdir(parents=True)
    (project / "blobs/1").write_text("x")
    (project / "my/model/a.json").symlink_to(project / "blobs/1")
    assert keep_settings(Checkpoint(str(project / "my/model")), kept) == ([], ["a.json"])
    assert keep_settings(Checkpoint(str(source), "model.gguf"), kept) == ([], [])


def test_settings_of_a_model_on_the_hub_are_downloaded_once_and_before_it_is_pruned(project, monkeypatch):
    asked = []

    def download(location: str, **given: Any) -> str:
        asked.append((location, given["revision"], "LICENSE" in given["allow_patterns"]))
        return str(project / "snapshot")

    for folder in ("snapshot", "kept"):
        (project / folder).mkdir()
    (project / "snapshot/LICENSE").write_text("x")
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    for _ in range(2):
        keep_settings(Checkpoint("some/model", revision="abc"), project / "kept")
    assert asked == [("some/model", "abc", True)]
    assert (project / "kept/LICENSE").read_text() == "x"


ASKED = {"model": {"path": "model"}, "prune": [MAGNITUDE], "output": "out"}


@pytest.mark.parametrize(
    ("where", "error", "told"),
    [
        ("transformers.PreTrainedConfig.save_pretrained", TypeError("not JSON serializable"),
         "cannot save LlamaForCausalLM to .*: not JSON serializable"),
        ("transformers.PreTrainedConfig.save_pretrained", ValueError("a parameter of generation"),
         "cannot save LlamaForCausalLM to .*: a parameter of generation"),
        ("transformers.PreTrainedTokenizerBase.save_pretrained", ValueError("no such template"),
         "cannot save the tokenizer to .*: no such template"),
        ("shutil.copyfile", PermissionError(13, "Permission denied"),
         r"cannot copy the settings of .*model to .*: Permission denied"),
    ],
)  # fmt: skip
def test_what_cannot_be_saved_or_copied_is_refused_before_pruning(where, error, told, project, monkeypatch):
    save_tiny_model(project / "model", "llama")
    (project / "model/LICENSE").write_text("x")
    monkeypatch.setattr(where, Mock(side_effect=error))
    with pytest.raises(ArtifactError, match=told):
        plan(ASKED)


def test_planning_leaves_no_file_and_the_config_as_it_was(project: Path) -> None:
    from compressx.models.loading import load_skeleton, load_tokenizer
    from compressx.pipeline.saving import check_saving
    from compressx.stages.state import RunState

    checkpoint = Checkpoint(str(save_tiny_model(project / "model", "llama", dtype=torch.bfloat16)))
    found = RunState(None, None, skeleton=load_skeleton(checkpoint), tokenizer=load_tokenizer(checkpoint))
    before = found.skeleton.config.to_json_string()
    check_saving(found, checkpoint)
    assert found.skeleton.config.to_json_string() == before
    assert [p.name for p in project.iterdir()] == ["model"]


TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_the_tokenizer_of_a_folder_is_written_byte_for_byte(kind: str, models: Any) -> None:
    """The one that was calibrated with; transformers makes another of a Qwen2 with it, which the card says."""
    folder = Path(shutil.copytree(models(kind), "mine/model"))
    text = Path(shutil.copy(models(kind).with_name("text.txt"), "mine")).read_text()
    made = Tokenizer(BPE(unk_token="<unk>"))  # noqa: S106 - a token of text
    made.pre_tokenizer = Metaspace()
    made.train_from_iterator([text], BpeTrainer(vocab_size=60, special_tokens=["<unk>", "<s>", "</s>"]))
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
              "unk_token": "<unk>", "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))  # as transformers 4 writes it
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    both(folder)
    for streamed in (False, True):
        output = Path(f"out-{streamed}/model")
        for name in TOKENIZER:
            assert (output / name).exists() == (folder / name).exists(), name
            assert not (folder / name).exists() or (output / name).read_bytes() == (folder / name).read_bytes()
        read = load_tokenizer(find_checkpoint(ModelSource(path=output)))
        assert read("w1 w2 w17")["input_ids"] == made.encode("w1 w2 w17").ids
        assert read.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"
        card, log = (output / "README.md").read_text(), (output.parent / "run.log").read_text()
        assert ("PreTrainedTokenizerFast.from_pretrained" in card) == (kind == "qwen2")
        assert ("AutoTokenizer and tokenizer.json make different tokens" in log) == (kind == "qwen2")
