"""Load a checkpoint: its model with or without weights, offloaded to disk, and its tokenizer.

What is missing or damaged is an `ArtifactError`, what is no causal language model in full precision, or no safetensors,
an `UnsupportedModelError`; both in one line.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from compressx.models import gguf_settings
from compressx.models.architecture import find_blocks, text_config
from compressx.models.checkpoint import Checkpoint, explained, local_folder
from compressx.models.gguf_header import GgufHeader, let_go, read_once
from compressx.models.shards import are_equal, files_of, find_shards, refuse_more_blocks
from compressx.models.tokenizer import as_in_folder, split_as_named
from compressx.runtime.errors import ArtifactError, UnsupportedModelError, one_line
from compressx.runtime.quiet import quiet_libraries

_TOKENIZER_FILE = re.compile(r"token|vocab|merges|spiece|sentencepiece|tekken|\.(model|spm|bpe)$", re.IGNORECASE)


@contextlib.contextmanager
def _reading(checkpoint: Checkpoint) -> Iterator[None]:
    """Read a checkpoint quietly, with errors explained, and the header of a GGUF file only once."""
    with quiet_libraries(), explained(checkpoint), contextlib.ExitStack() as stack:
        if checkpoint.file is not None:
            stack.enter_context(read_once(checkpoint.file))
        yield


def load_skeleton(checkpoint: Checkpoint) -> Any:
    """Build the model on the meta device: every module and shape, no weights."""
    from transformers import AutoModelForCausalLM

    with _reading(checkpoint):
        config = _config(checkpoint)
        build = partial(AutoModelForCausalLM.from_config, config, trust_remote_code=checkpoint.trust_remote_code)
        with torch.device("meta"):
            model = _with_its_head(checkpoint, build(), build).eval()
        if checkpoint.file is not None:
            gguf_settings.refuse_tensors(model, GgufHeader.of(checkpoint.file).as_llama)
        return model


def load_empty(checkpoint: Checkpoint) -> Any:
    """Build the model that `load_model` would load, with parameters on the meta device and computed buffers filled."""
    with _reading(checkpoint):
        config = _config(checkpoint)
        dtype = dtype_of(checkpoint.at(local_folder(checkpoint)), config)
        build = partial(build_empty, config, dtype, trust_remote_code=checkpoint.trust_remote_code)
        model = _with_its_head(checkpoint, build(), build).eval()
        if model.can_generate():  # settings of generation may stand in config.json, whose class leaves them out
            model.adjust_generation_fn(
                None, True, None, checkpoint.location, cache_dir=None, force_download=False, proxies=None,
                local_files_only=False, token=None, revision=checkpoint.revision or "main", subfolder="",
                trust_remote_code=checkpoint.trust_remote_code,
            )  # fmt: skip
        return model


def build_empty(config: Any, dtype: torch.dtype | None, *, trust_remote_code: bool = False) -> Any:
    """Build a model with parameters of `dtype` (None: the config's) on `meta`, and `from_pretrained`'s buffers."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with init_empty_weights(include_buffers=False), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    # The buffers were computed in `dtype`, which puts GPT-J's rotary angles off by 0.9 in bfloat16. Compute them again
    # in float32, as `from_pretrained` does.
    for module in model.modules():
        module._is_hf_initialized = False
    for parameter in model.parameters():  # there is nothing to be drawn
        parameter._is_hf_initialized = True
    with torch.no_grad():
        model.initialize_weights()
    return model


def dtype_of(checkpoint: Checkpoint, config: Any) -> torch.dtype:
    """Return the dtype that `load_model` loads in; of a model on the hub whose config has none, float32."""
    if checkpoint.dtype != "auto":
        return getattr(torch, checkpoint.dtype)  # type: ignore[no-any-return]
    if checkpoint.file is not None:
        return torch.float32
    return config.dtype or _stored_dtype(Path(checkpoint.location)) or torch.float32


def _stored_dtype(folder: Path) -> torch.dtype | None:
    """Return the dtype of a checkpoint's first floating-point weight, transformers' choice if the config has none."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                first: torch.Tensor = file.get_slice(name)[:0]
                if first.is_floating_point():
                    return first.dtype
    return None


def load_model(checkpoint: Checkpoint) -> Any:
    """Load the model with its weights, in evaluation mode, on the CPU.

    A GGUF checkpoint is dequantized, and its model can be saved like any other.
    """
    from transformers import AutoModelForCausalLM

    dtype = "float32" if checkpoint.file is not None and checkpoint.dtype == "auto" else checkpoint.dtype
    with _reading(checkpoint):
        if checkpoint.file is None:
            folder = local_folder(checkpoint)  # of the hub it is checked there before it is read
            _config(checkpoint)
            given: dict[str, Any] = {"use_safetensors": True}
        else:
            given = {"config": (skeleton := load_skeleton(checkpoint)).config}
            skeleton.tie_weights(recompute_mapping=False)
            header = GgufHeader.of(checkpoint.file).as_llama
            held = sum(math.prod(map(int, x.shape)) for x in header.tensors)
            if (claimed := sum(p.numel() for p in skeleton.parameters())) > held:
                raise ArtifactError(  # transformers would allocate them
                    f"{checkpoint.file} is of {claimed} numbers by its metadata, but has {held}; download it again"
                )
        model, found = AutoModelForCausalLM.from_pretrained(
            checkpoint.location, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True,
            **given, **checkpoint.arguments,
        )  # fmt: skip
        if checkpoint.file is not None:
            unread = (*sorted(found["unexpected_keys"]), *gguf_settings.unread(header))
            let_go()
    if found["missing_keys"] and checkpoint.file is None:

        def tie() -> Any:
            model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
            model.tie_weights()
            found["missing_keys"] = {*found["missing_keys"]} - model.all_tied_weights_keys.keys()
            return model

        _with_its_head(checkpoint, model, tie)
    # transformers would continue with random weights.
    if missing := sorted(found["missing_keys"]):
        raise ArtifactError(f"{checkpoint.location}: the checkpoint lacks {', '.join(missing[:3])}")
    if checkpoint.file is None:
        blocks: Iterable[str] = ()
        with contextlib.suppress(UnsupportedModelError):
            blocks = find_blocks(model)
        find_shards(folder, model, blocks)
        unread = model.unread
    else:
        refuse_more_blocks(checkpoint.location, unread, set(find_blocks(model)) if unread else ())
    for name, stored, expected in sorted(found["mismatched_keys"]):
        raise ArtifactError(
            f"{checkpoint.location}: {name} has shape {[*stored]}, but the config expects {[*expected]}; one of the "
            "two belongs to another model"
        )
    untie_own_head(model)
    model = (_without_gguf(model) if checkpoint.file is not None else model).eval()
    model.unread = unread
    return model


def untie_own_head(model: Any) -> None:
    """Correct a config that ties the head to the embedding, if the checkpoint has another head.

    transformers then loads both and only warns, and whatever ties weights later, as lm-evaluation-harness does, would
    replace the head. Where the config ties blocks as well, as Zamba's does, it stays.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is embedding.weight or head.weight.shape != embedding.weight.shape:
        return
    if not model.all_tied_weights_keys:
        _say_tied(model, tied=False)


def _say_tied(model: Any, *, tied: bool) -> None:
    for config in (model.config, text_config(model)):
        if getattr(config, "tie_word_embeddings", tied) != tied:
            config.tie_word_embeddings = tied


def _with_its_head(checkpoint: Checkpoint, model: Any, again: Callable[[], Any]) -> Any:
    """Return a model with a head of its own if its folder has one, else with the embedding's, whatever its config says.

    Of the hub's models and of GGUF files nothing is known before they are read. `again` makes the model anew, after its
    config was corrected.
    """
    folder, parts = Path(checkpoint.location), (model.get_output_embeddings(), model.get_input_embeddings())
    shapes = {tuple(part.weight.shape) for part in parts if getattr(part, "weight", None) is not None}
    if checkpoint.file is not None or not folder.is_dir() or None in parts or len(shapes) != 1:
        return model
    names, files = {id(module): name for name, module in model.named_modules()}, files_of(folder)
    ends = [f".{names[id(part)]}.weight" for part in parts]
    # Folders may have names without the prefix of the model's, or with another.
    head, embedding = ([n for n in files if end.endswith(f".{n}") or f".{n}".endswith(end)] for end in ends)
    said = model.config.get_text_config(decoder=True).tie_word_embeddings
    others = model.all_tied_weights_keys.keys() - {ends[0][1:]}
    if said and head and embedding and not others and not are_equal(folder, files, head, embedding):
        _say_tied(model, tied=False)
    elif not said and embedding and not head:
        _say_tied(model, tied=True)
    else:
        return model
    return again()


def load_offloaded(checkpoint: Checkpoint, blocks: Iterable[str], device: torch.device, folder: Path) -> Any:
    """Load a model with its decoder blocks on disk, in `folder`; accelerate reads a block whenever it is called."""
    from transformers import AutoModelForCausalLM

    with _reading(checkpoint):
        skeleton = load_skeleton(checkpoint := checkpoint.at(local_folder(checkpoint)))
        placed = dict.fromkeys(blocks, "disk")
        for name, _ in (*skeleton.named_parameters(remove_duplicate=False), *skeleton.named_buffers()):
            if not any(name.startswith(f"{fqn}.") for fqn in blocks):
                placed[name.rpartition(".")[0]] = str(device)
        return AutoModelForCausalLM.from_pretrained(
            checkpoint.location, dtype=checkpoint.dtype, device_map=placed, offload_folder=str(folder),
            use_safetensors=True, config=skeleton.config, **checkpoint.arguments,
        ).eval()  # fmt: skip


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """Load the tokenizer. Text becomes the tokens that a folder's tokenizer.json makes of it, or the GGUF file."""
    from transformers import AutoTokenizer

    folder = Path(checkpoint.location)
    local = checkpoint.file is None and folder.is_dir()
    tokenizer = None
    try:
        if not local or any(_TOKENIZER_FILE.search(path.name) for path in folder.iterdir()):
            with _reading(checkpoint):
                tokenizer = AutoTokenizer.from_pretrained(checkpoint.location, **checkpoint.arguments)
                if checkpoint.file is not None:
                    tokenizer = split_as_named(tokenizer, GgufHeader.of(checkpoint.file))
                else:
                    tokenizer = as_in_folder(tokenizer, checkpoint)
    except Exception as error:
        if type(error) is not Exception:  # which the library of tokenizers raises
            raise
        raise ArtifactError(
            f"cannot load the tokenizer of {checkpoint.location}: {one_line(str(error))}; its tokenizer.json is "
            "damaged, or for another version of the package tokenizers"
        ) from error
    # Without a vocabulary transformers makes a tokenizer that knows no word.
    if tokenizer is None or {*tokenizer.get_vocab()} <= {*tokenizer.all_special_tokens}:
        raise ArtifactError(
            f"{checkpoint.location} has no tokenizer, such as tokenizer.json; save the model's there, with "
            "AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)"
        )
    return tokenizer


def vocabularies_differ(checkpoint: Checkpoint, skeleton: Any, model: Any, tokenizer: Any) -> str:
    """Say how the vocabulary of a checkpoint is not a model's, in size or tokens; empty where predictions compare.

    Fine-tunes rename tokens that were reserved: one of a hundred may differ.

    Args:
        checkpoint: whose tokenizer is read.
        skeleton: of the checkpoint.
        model: the other one.
        tokenizer: the model's, None if it has none: then only the sizes are compared.
    """
    size, expected = (text_config(x).vocab_size for x in (skeleton, model))
    if size != expected:
        return f"a vocabulary of {size} tokens and the model one of {expected}; expected the same"
    if tokenizer is None:
        return ""
    its, own = ({i: token for token, i in x.get_vocab().items()} for x in (load_tokenizer(checkpoint), tokenizer))
    wrong = [i for i in sorted(its.keys() & own.keys()) if its[i] != own[i]]
    if 100 * len(wrong) <= len(own):
        return ""
    return f"{its[wrong[0]]!r} as token {wrong[0]} and the model {own[wrong[0]]!r}; expected the same vocabulary"


def _config(checkpoint: Checkpoint) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(checkpoint.location, **checkpoint.arguments)
    if checkpoint.file is not None:
        config = gguf_settings.completed(config, GgufHeader.of(checkpoint.file).as_llama)
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError(
            f"{checkpoint.location} is quantized (its config has a quantization_config); prune the full-precision "
            "model, then quantize"
        )
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        kernels = str(getattr(part, "_attn_implementation", None))
        if kernels not in {"None", "eager", "sdpa", "flex_attention"}:  # others transformers may fetch, and run
            raise UnsupportedModelError(
                f"{checkpoint.location}: config.json asks for attn_implementation {one_line(kernels):.80}, expected "
                "eager or sdpa; remove it there: it is not part of the model"
            )
    _refuse_encoder(checkpoint, config)
    return config


def _refuse_encoder(checkpoint: Checkpoint, config: Any) -> None:
    """Refuse an encoder, which transformers would load with the head of a decoder, and an encoder-decoder."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    decodes = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    masked = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if not decodes and (config.is_encoder_decoder or masked):
        kind = "an encoder-decoder" if config.is_encoder_decoder else "an encoder, which sees the tokens that follow"
        (name, *_) = config.architectures or [config.model_type]
        raise UnsupportedModelError(
            f"{checkpoint.location}: {name} is {kind}; compressx prunes decoder-only language models, such as Llama, "
            "Gemma or GPT-2"
        )


def _without_gguf(model: Any) -> Any:
    """Rebuild a model from GGUF without the keys of its config that describe the file and would prevent saving it."""
    described = {"quantization_config", "_name_or_path", "_model_name_or_path"}
    config = type(model.config).from_dict({k: x for k, x in model.config.to_dict().items() if k not in described})
    # Not `.to(dtype)`, which would round the rotary tables: they are float32 whatever the weights are.
    clean = build_empty(config, model.dtype)
    clean.load_state_dict(model.state_dict(), assign=True)
    clean.tie_weights()
    clean.generation_config = model.generation_config
    return clean
