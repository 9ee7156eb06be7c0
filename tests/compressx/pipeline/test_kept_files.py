"""What stands in a model's folder stands in the output's: in memory and streamed, tensor by tensor and byte by byte."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.compressx.foreign import save_foreign

from compressx.evaluation.saved import apply_masks, source_of
from compressx.models.checkpoint import Checkpoint, keep_settings
from compressx.pipeline.run import plan, run
from compressx.runtime.errors import ArtifactError
from compressx.testing import TINY_CONFIGS, save_tiny_model

HALF = {"targets": ["*"], "pruner": "magnitude", "sparsity": 0.5}
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


def both(source: Path, trust: bool = False, **sections: Any) -> list[Path]:
    """Run in memory and streamed, and return the models' folders."""
    for streaming in (False, True):
        model = {"path": str(source), "streaming": streaming, "trust_remote_code": trust}
        run({"model": model, "prune": [HALF], "output": f"out-{streaming}", **sections})
    return [Path(f"out-{streaming}/model") for streaming in (False, True)]


@pytest.mark.parametrize("architecture", TINY_CONFIGS)
def test_in_memory_and_streamed_give_the_same_files_with_all_that_stood_beside_the_weights(
    architecture, models, project
):
    source = dressed(models(architecture), project / "model")
    whole, streamed = both(source)
    assert stored(whole) == stored(streamed)
    assert others(whole) == others(streamed)
    for name, text in KEPT.items():
        assert (whole / name).read_text() == text
    assert not {*others(whole)} & {*DROPPED}
    assert stored(source).keys() == stored(whole).keys()


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
    whole, streamed = both(project / "model")
    assert stored(whole) == stored(streamed)
    assert others(whole) == others(streamed)
    found, _ = ImageProcessingMixin.get_image_processor_dict(str(whole))
    assert found["image_processor_type"] == "Gemma3ImageProcessor"


def test_a_smaller_model_has_what_stood_beside_the_dense_one(models: Any, project: Path) -> None:
    source = dressed(models("llama"), project / "model")
    rule = {"targets": ["*.mlp.*"], "pruner": "magnitude", "sparsity": 0.5, "pattern": "neurons"}
    run({"model": {"path": str(source)}, "output": "out", "shrink": True, "prune": [rule]})
    for name, text in KEPT.items():
        assert (Path("out/model") / name).read_text() == text


def test_a_model_with_applied_masks_has_what_stood_beside_it(models: Any, project: Path) -> None:
    source = dressed(models("llama"), project / "model")
    both(source)
    apply_masks(Path("out-False/masks.safetensors"), source_of(str(source)), Path("applied"))
    assert {**others(Path("applied/model")), "config.json": b""} == {
        **others(Path("out-False/model")),
        "config.json": b"",
    }


def test_a_model_with_python_code_of_its_own_keeps_it_in_memory_streamed_and_shrunk(project: Path) -> None:
    source = save_foreign(project / "model")
    whole, streamed = both(source, trust=True)
    assert stored(whole) == stored(streamed)
    assert others(whole) == others(streamed)
    rule = {"targets": ["*"], "pruner": "shortgpt", "sparsity": 0.4, "pattern": "blocks"}
    model = {"path": str(source), "trust_remote_code": True}
    text = {"dataset": {"text": str(source.with_name("text.txt"))}, "samples": 4, "sequence_length": 16}
    run({"model": model, "output": "out", "shrink": True, "prune": [rule], "calibration": text})
    for code in source.glob("*.py"):
        for folder in (whole, streamed, Path("out/model")):
            assert (folder / code.name).read_text() == code.read_text()


def test_what_is_copied_and_what_is_left_out_stands_once_in_the_log(models: Any, project: Path) -> None:
    both(dressed(models("llama"), project / "model"))
    lines = Path("out-False/run.log").read_text().splitlines()
    (copied,) = [x for x in lines if "INFO model: copied" in x]
    assert "'preprocessor_config.json'" in copied
    (left,) = [x for x in lines if "INFO model: left out" in x]
    assert f"left out 'figures', 'training_args.bin', 'weights.json.pt' of {project / 'model'}" in left


def test_where_nothing_is_left_out_the_log_does_not_speak_of_it(models: Any) -> None:
    both(models("llama"))
    (said,) = [x for x in Path("out-False/run.log").read_text().splitlines() if "INFO model:" in x]
    assert f"copied 'generation_config.json' of {models('llama')}" in said


def test_links_lead_to_the_blobs_of_the_hub_and_nowhere_else_out_of_the_folder(project: Path) -> None:
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


def test_a_link_in_a_folder_of_ones_own_does_not_lead_to_blobs(project: Path) -> None:
    for folder in ("blobs", "my/model", "kept"):
        (project / folder).mkdir(parents=True)
    (project / "blobs/1").write_text("x")
    (project / "my/model/a.json").symlink_to(project / "blobs/1")
    assert keep_settings(Checkpoint(str(project / "my/model")), project / "kept") == ([], ["a.json"])


def test_nothing_beside_a_gguf_file_is_copied(project: Path) -> None:
    (project / "letter.txt").write_text("x")
    assert keep_settings(Checkpoint(str(project), "model.gguf"), project) == ([], [])


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


ASKED = {"model": {"path": "model"}, "prune": [HALF], "output": "out"}


@pytest.mark.parametrize(
    ("owner", "error", "told"),
    [
        ("PreTrainedConfig", TypeError("not JSON serializable"), "cannot save LlamaForCausalLM to "),
        ("PreTrainedConfig", ValueError("a parameter of generation"), "cannot save LlamaForCausalLM to "),
        ("PreTrainedTokenizerBase", ValueError("no such template"), "cannot save the tokenizer to "),
    ],
)
def test_a_config_or_tokenizer_that_cannot_be_saved_is_refused_before_pruning(owner, error, told, project, monkeypatch):
    def broken(*_: Any, **_given: Any) -> None:
        raise error

    save_tiny_model(project / "model", "llama")
    monkeypatch.setattr(f"transformers.{owner}.save_pretrained", broken)
    with pytest.raises(ArtifactError, match=f"{told}.*: {error}"):
        plan(ASKED)


def test_a_file_that_cannot_be_copied_is_refused_before_pruning(project, monkeypatch) -> None:
    def unreadable(source: Path, _target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(source))

    save_tiny_model(project / "model", "llama")
    (project / "model/LICENSE").write_text("x")
    monkeypatch.setattr(shutil, "copyfile", unreadable)
    with pytest.raises(ArtifactError, match=r"cannot copy the settings of .*model to .*: Permission denied"):
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
