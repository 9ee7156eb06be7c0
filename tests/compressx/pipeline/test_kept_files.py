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
from tests.compressx.gguf_files import write_like
from tests.compressx.pipeline.runs import MAGNITUDE
from tests.compressx.two_of_four import two_of_four
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.trainers import BpeTrainer

from compressx.evaluation.saved import apply_masks, export_saved, source_of
from compressx.models.checkpoint import Checkpoint, find_checkpoint, keep_settings
from compressx.models.loading import load_model, load_tokenizer
from compressx.models.packed_folder import pack_folder, unpack_folder
from compressx.pipeline.run import plan, run
from compressx.plugins.manager import load_plugins
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import ArtifactError, CompressxError
from compressx.testing import TINY_CONFIGS, save_tiny_model, tiny_model

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
    assert keep_settings(Checkpoint(str(source), source / "model.gguf"), kept) == ([], [])


SLOW = pytest.mark.slow
SECRET = b'{"secret": "of the user"}'


def pruned(source: Path, **more: Any) -> None:
    """Run."""
    streaming = more.pop("streaming", False)
    run({"model": {"path": str(source), "streaming": streaming}, "prune": [MAGNITUDE], "output": "out", **more})


def exported(name: str, **given: Any) -> Any:
    """Return what exports a folder in a format."""

    def export(source: Path) -> None:
        options = {} if name != "gguf" else {"like": "like.gguf"}
        export_saved(source_of(str(source), **given), name, options, Path("out"), load_plugins())

    return export


COMMANDS: dict[str, Any] = {
    "run": pruned,
    "streamed": lambda source: pruned(source, streaming=True),
    "shrunk": lambda source: pruned(source, shrink=True, prune=[MAGNITUDE | NEURONS]),
    "exported by a run": lambda source: pruned(source, export=["safetensors", "packed"]),
    "apply": lambda source: apply_masks(Path("masks.safetensors"), source_of(str(source)), Path("out")),
    "safetensors": exported("safetensors"),
    "safetensors in float16": exported("safetensors", dtype="float16"),
    "packed": exported("packed"),
    "packed in float16": exported("packed", dtype="float16"),
    "gguf": exported("gguf"),
    "pack": lambda source: pack_folder(source, Path("out")),
    "unpack": lambda source: unpack_folder(source, Path("out")),
    "unpacked for a run": pruned,
}
"""What writes a model that it is given."""

READ = {"chat_template.jinja": "../secret", "generation_config.json": "{project}/secret", "vocab.txt": "../secret",
        "tokenizer.model": "nowhere", "merges.txt": "merges.txt", "code.py": "../project/secret",
        "special_tokens_map.json": ".hidden", "added_tokens.json": None,
        "additional_chat_templates/one.jinja": "../../secret"}  # fmt: skip
"""Links to another place, or a FIFO, among what transformers reads."""
BESIDE = {"LICENSE": "../secret", "notes": "../private", "notes.md": "{project}/secret", "zeros": "/dev/zero",
          "loop": "loop", "up": "..", "pipe": None}  # fmt: skip
"""The same in other places."""


def odd(folder: Path, name: str, to: str | None) -> None:
    """Make a link, or a FIFO, in a folder."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).parent.mkdir(exist_ok=True)
    if to is None:
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(to.format(project=folder.parent))


def given(project: Path, command: str) -> Path:
    """Return a model's folder for a command, with a secret beside it and hidden in it."""
    source = project / "model"
    save_tiny_model(source, "llama")
    (project / "secret").write_bytes(SECRET)
    (project / "private").mkdir()
    (project / "private/x.json").write_bytes(SECRET)
    if command == "gguf":
        write_like(project / "like.gguf", load_model(Checkpoint(str(source))), "llama")
    if command == "apply":
        two_of_four(load_model(Checkpoint(str(source)))).save(project / "masks.safetensors")
    if command.startswith("unpack"):
        pack_folder(source, project / "packed")
        source = project / "packed"
    (source / ".hidden").write_bytes(SECRET)
    return source


def refuses(command: str, source: Path, match: str) -> None:
    """Check that a command refuses a folder in one line, and writes nothing."""
    before = sorted(Path().rglob("*"))
    with pytest.raises(CompressxError, match=match) as raised:
        COMMANDS[command](source)
    assert "\n" not in str(raised.value)
    assert sorted(Path().rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_writes_what_a_link_leads_to(command, project, monkeypatch):
    """Nor what else a stranger's folder has that is not the model's; packing refuses where running leaves it out."""
    monkeypatch.setenv("COMPRESSX_CACHE", str(project / "cache"))
    source = given(project, command)
    for name, to in READ.items():
        kept = (source / name).read_bytes() if (source / name).is_file() else None
        odd(source, name, to)
        message = "is a FIFO" if to is None else "is a link to"
        refuses(command, source, f"{Path(name).name} {message}")
        (source / name).unlink()
        if kept is not None:
            (source / name).write_bytes(kept)
    packs = command in {"safetensors", "packed", "pack", "unpack", "unpacked for a run"}
    for name, to in BESIDE.items():
        odd(source, name, to)
        if packs or name in {"pipe", "zeros"}:
            refuses(command, source, f"{name} is a (link to|FIFO)")
            (source / name).unlink()
    (source / "figures").mkdir()
    for name in ("figures/1.json", "id_rsa", "training.data", "consolidated.safetensors", "params.json"):
        (source / name).write_bytes(SECRET)
    (source / "vocab.json").mkdir()
    with (source / "large.txt").open("wb") as file:
        file.truncate(2**27)
    COMMANDS[command](source)
    files = [path for path in (Path("out"), *Path("out").rglob("*")) if path.is_file() or path.is_symlink()]
    assert files
    assert not any(path.is_symlink() or SECRET in path.read_bytes() for path in files)
    assert not {"vocab.json", "large.txt", ".hidden", *BESIDE} & {path.name for path in files}


def with_values(path: Path, **values: Any) -> None:
    """Change values of a JSON file, which need not be there."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, **values}))


@pytest.mark.slow
def test_nothing_that_a_folder_names_elsewhere_is_read_or_fetched(project, monkeypatch):
    """Neither by the recipe and report beside a model, nor by its config, tokenizer or adapter."""
    asked = Mock(side_effect=OSError("a network"))
    monkeypatch.setattr("compressx.models.checkpoint._download", asked)
    monkeypatch.setattr("socket.socket.connect", asked)
    source = save_tiny_model(project / "strange/model", "llama")
    write_like(project / "like.gguf", load_model(Checkpoint(str(source))), "llama")
    (project / "secret").write_bytes(SECRET)
    package = {"package": "some", "version": "1", "file": "x.gguf", "sha256": "0" * 64}
    with_values(source.parent / "report.json", model=package, figures=[{"file": "../secret", "caption": ""}])
    with_values(source / "config.json", _name_or_path="some/model", base_model_name_or_path="some/model")
    elsewhere = dict.fromkeys(("vocab_file", "tokenizer_file", "merges_file", "name_or_path"), str(project / "secret"))
    with_values(source / "tokenizer_config.json", **elsewhere)
    for model in (package, {"path": str(project / "like.gguf")}, {"id": "some/model"}):
        with_values(source.parent / "recipe.yaml", model=model, prune=[MAGNITUDE], output="x")
        with pytest.raises(CompressxError, match="name a GGUF file of the dense model as like: FILE"):
            export_saved(source_of("strange"), "gguf", {}, Path("out"), load_plugins())
    (source.parent / "recipe.yaml").unlink()
    for name in ("run", "streamed", "safetensors", "safetensors in float16", "packed", "pack"):
        COMMANDS[name](source.parent)
        assert not any(SECRET in path.read_bytes() for path in Path("out").rglob("*") if path.is_file()), name
        shutil.rmtree("out")
    for key in ("attn_implementation", "_attn_implementation"):
        for value in ("kernels-community/flash-attn", "someone/code", "flash_attention_2"):
            with_values(source / "config.json", **{key: value})
            two_of_four(tiny_model("llama")).save(project / "masks.safetensors")
            for name in ("run", "apply", "safetensors"):
                refuses(name, source.parent, f"config.json asks for attn_implementation {value}")
        with_values(source / "config.json", **{key: "eager"})
    with_values(source / "adapter_config.json", base_model_name_or_path="some/model")
    for name in ("run", "apply", "safetensors", "gguf"):
        refuses(name, source.parent, "is a PEFT adapter")
    asked.assert_not_called()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("safetensors", "float16"), *(pytest.param(*x, marks=SLOW) for x in (
        ("safetensors", "float32"), ("safetensors", "auto"), ("packed", "float16"), ("packed", "auto")))],
)  # fmt: skip
def test_a_folder_is_exported_in_the_dtype_that_is_asked_for(name, dtype, project, monkeypatch):
    """In each tensor and in the config; numbers that it cannot hold are refused."""
    from compressx.models import streaming

    source = save_tiny_model(project / "model", "mixtral", dtype=torch.bfloat16)
    (source / "README.md").write_text("license: mit")
    for streamed in (False, True):
        monkeypatch.setattr(streaming, "is_larger_than_memory", lambda *_, streamed=streamed: streamed)
        exported(name, dtype=dtype)(source)
        if name == "packed":
            unpack_folder(Path("out"), Path("plain"))
            shutil.rmtree("out")
            Path("plain").rename("out")
        wanted = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
        tensors = {key: value[0] for key, value in stored(Path("out")).items()}
        assert {*tensors.values()} == {wanted}
        assert tensors.keys() == stored(source).keys()
        assert json.loads(Path("out/config.json").read_text())["dtype"] == str(wanted).removeprefix("torch.")
        assert Path("out/README.md").read_text() == "license: mit"
        loaded = load_model(Checkpoint("out")).state_dict()
        for key, tensor in load_model(Checkpoint(str(source))).state_dict().items():
            assert torch.equal(loaded[key], tensor.to(wanted))
        shutil.rmtree("out")
        if dtype == "auto":
            exported(name)(source)
            same = [x for x in source.iterdir() if x.name.endswith((".json", ".md"))]
            assert all((Path("out") / x.name).read_bytes() == x.read_bytes() for x in same)
            shutil.rmtree("out")
    model = tiny_model("llama", dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = -1e30
    wide = save_tiny_model(project / "wide", "llama", dtype=torch.bfloat16)
    model.save_pretrained(wide)
    if dtype == "float16":
        with pytest.raises(ArtifactError, match=r"up_proj.weight has NaN or infinite values; .* dtype is too narrow"):
            exported(name, dtype=dtype)(wide)
        assert not Path("out").exists()
    else:
        exported(name, dtype=dtype)(wide)


SMALL = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "bos_token_id": 1,
         "num_attention_heads": 4, "max_position_embeddings": 128, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2, "rope_theta": 50000.0, "rope_scaling": None}
MOE = {**GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
LONGROPE = {"type": "longrope", "short_factor": [1.1, 1.2, 1.3, 1.4], "long_factor": [2.0, 3.0, 4.0, 5.0]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
OLDER = {
    "llama": GROUPED,
    "llama, of llama 3": {**GROUPED, "rope_scaling": LLAMA3},
    "llama, linear by its older name": {**GROUPED, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama, yarn": {**GROUPED, "rope_scaling": YARN},
    "gemma3_text": {**GROUPED, "head_dim": 16, "sliding_window": 4, "sliding_window_pattern": 2,
                    "rope_local_base_freq": 20000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gemma2": {**GROUPED, "head_dim": 16, "sliding_window": 4},
    "qwen2": {**GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "phi3": {**GROUPED, "original_max_position_embeddings": 32, "partial_rotary_factor": 0.5,
             "rope_scaling": LONGROPE},
    "mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1},
    "gpt_neox": {**SMALL, "rotary_pct": 0.5, "rotary_emb_base": 30000},
    "stablelm": {**GROUPED, "partial_rotary_factor": 0.25},
    "falcon": {**SMALL, "rope_theta": 50000.0, "alibi": False},
}  # fmt: skip
"""Configs as transformers 4 wrote them, by the type of the model."""


@pytest.mark.parametrize("kind", [pytest.param(x, marks=[SLOW] * (x != "gpt_neox")) for x in OLDER])
def test_the_config_of_a_model_from_transformers_4_says_the_same_to_it_afterwards(kind, project, monkeypatch):
    """Version 4.57 gave equal log-probabilities for each of these, shrunk ones among them, in a trial by hand."""
    from transformers import AutoConfig, AutoModelForCausalLM

    older = {"model_type": kind.partition(",")[0], "torch_dtype": "float32", "_name_or_path": "x", **OLDER[kind]}
    config = AutoConfig.for_model(**older, tie_word_embeddings=False)
    source = save_tiny_model(project / "model", "llama")
    (source / "model.safetensors").unlink()
    AutoModelForCausalLM.from_config(config).save_pretrained(source)
    (source / "config.json").write_text(json.dumps({**older, "tie_word_embeddings": False}))
    before = AutoConfig.from_pretrained(source).to_dict()
    whole = both(source)
    written = json.loads((whole / "config.json").read_text())
    assert {key: written.get(key) for key in older if key[0] != "_"} == {k: x for k, x in older.items() if k[0] != "_"}
    assert "_name_or_path" not in written
    again = AutoConfig.from_pretrained(whole).to_dict()
    assert {key: again.get(key) for key in before} == before | {
        key: again[key] for key in ("dtype", "architectures", "transformers_version", "_name_or_path") if key in again
    }
    assert "Where version 4 wrote the dense model's config, it reads this one" in (whole / "README.md").read_text()
    if kind == "llama":
        exported("safetensors", dtype="bfloat16")(source)
        assert json.loads(Path("out/config.json").read_text())["torch_dtype"] == "bfloat16"
    if kind in {"llama", "gemma3_text", "phi3"}:
        run({"model": str(source), "output": "small", "shrink": True, "prune": [MAGNITUDE | NEURONS]})
        small = json.loads(Path("small/model/config.json").read_text())
        assert small["intermediate_size"] < 96
        assert {key: small[key] for key in written if key not in {"compressx", "intermediate_size"}} == {
            key: value for key, value in written.items() if key not in {"compressx", "intermediate_size"}
        }


def test_older_keys_that_would_make_another_config_are_not_kept(project: Path) -> None:
    save_tiny_model(project / "kept", "llama")
    shutil.copytree(project / "kept", project / "source")
    with_values(project / "source/config.json", rope_parameters={"rope_theta": 7.0, "extra": 1}, num_experts=3)
    saved = (project / "kept/config.json").read_text()
    keep_settings(Checkpoint(str(project / "source")), project / "kept")
    assert (project / "kept/config.json").read_text() == saved


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
        ("transformers.PreTrainedConfig.save_pretrained", TypeError("not JSON\nserializable"),
         r"cannot save LlamaForCausalLM to .*: not JSON\\nserializable"),
        ("transformers.PreTrainedTokenizerBase.save_pretrained", ValueError("no such template"),
         "cannot save the tokenizer to .*: no such template"),
        ("shutil.copyfile", PermissionError(13, "Permission denied"),
         r"cannot copy model/LICENSE to .*: Permission denied"),
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
