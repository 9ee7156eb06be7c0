"""The exporter `gguf`: one file for llama.cpp, without the neurons, heads and blocks that are all zeros.

Metadata, tokenizer and names come from a GGUF file of the dense model. transformers reads those files, and what it does
to a tensor is undone here: the result is given to transformers' own reader, which has to return the model's tensor.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from pydantic import BaseModel, Field, field_validator
from torch import Tensor

from compressx.api.exporter import ExporterSpec, FinishedModel, PlannedModel
from compressx.api.hooks import hookimpl
from compressx.api.patterns import UnitKind, Units
from compressx.api.projections import head_size
from compressx.api.pruner import Block
from compressx.models import gguf_settings
from compressx.models.access import Access
from compressx.models.architecture import architecture_of, find_blocks, text_config
from compressx.models.checkpoint import Checkpoint, find_local
from compressx.models.gguf_described import described
from compressx.models.gguf_header import BLOCK, GgufHeader
from compressx.models.gguf_readers import Readers
from compressx.models.gguf_tokenizer import own_tokenizer, tokenizer_metadata
from compressx.models.loading import load_skeleton
from compressx.models.shards import OUTSIDE
from compressx.models.units import find_units
from compressx.runtime.errors import ArtifactError, UnsupportedModelError
from compressx.runtime.files import written_whole

Kind: TypeAlias = Literal["F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1"]
KINDS: tuple[str, ...] = get_args(Kind)
"""The types that the package `gguf` quantizes to."""

ROW = 32
"""Weights of a row that Q8_0 to Q4_1 store together: other rows stay in float16."""

_IN_FLOAT = re.compile(r"norm|ffn_gate_inp|position_embd|token_types|conv")

FEWER_HEADS = {"llama", "qwen2", "qwen3", "gemma2", "gemma3", "deci"}
"""Architectures of llama.cpp whose matrices follow the number of heads, and whose blocks add to their input."""
OWN_WIDTHS = {"llama", "qwen2", "deci"}
"""Those that llama.cpp's `deci` computes as well, whose blocks have heads and widths of their own."""
_NOT_COPIED = re.compile(
    r"general\.(architecture|alignment|size_label|file_type|quantization_version)|(GGUF|split|quantize)\..*"
)
"""Metadata of the file itself, and what is no longer so."""
_MOST = 65504.0
"""The largest float16: of values, and of scales of Q8_0 to Q4_1."""

_log = logging.getLogger(__name__)


def stored_type(name: str, shape: Sequence[int], kind: str, *, tied: bool) -> str:
    """Return the type in which a file of a kind stores a tensor, rows first, as llama.cpp's llama-quantize does.

    That takes Q6_K for the output matrix of files of 4 and 5 bits, which the package `gguf` cannot write; here it is
    Q8_0, as there where rows are no multiples of 256. `tied` says that the embedding is the output matrix, too.
    """
    if len(shape) == 1 or _IN_FLOAT.search(name):
        return "F32"
    if kind[0] == "Q" and shape[-1] % ROW:
        return "F16"
    output = name == ("token_embd.weight" if tied else "output.weight")
    return "Q8_0" if output and kind[:2] in {"Q4", "Q5"} else kind


def stored_bytes(shape: Sequence[int], stored: str) -> int:
    """Return the bytes of a tensor in a file, without those to the next multiple of 32, where the next one begins."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[stored]]
    return math.prod(shape) // int(weights) * int(size)


class GgufOptions(BaseModel):
    """What a recipe may say under `options`."""

    type: Kind = Field("Q8_0", description="of the matrices: F16, BF16, Q8_0, Q5_0, Q5_1, Q4_0 or Q4_1")
    like: Path | None = Field(
        None, description="GGUF file of the dense model, for metadata and tokenizer; by default the recipe's model"
    )

    @field_validator("type", mode="before")
    @classmethod
    def _quantized_elsewhere(cls, kind: object) -> object:
        kind = kind.upper() if isinstance(kind, str) else kind
        if kind not in KINDS:
            raise ValueError(
                f"{kind!r} is none of {', '.join(KINDS)}; for others write F16, then run llama.cpp's "
                f"llama-quantize FILE {kind}"
            )
        return kind


def template_of(path: Path) -> GgufHeader:
    """Return the header of a GGUF file of the dense model: its metadata and shapes; none of its weights are read."""
    if path.expanduser().is_dir():
        raise ArtifactError(f"like: {path} is a folder, expected a GGUF file of the dense model; or leave out like")
    template = GgufHeader.of(find_local(path))
    if not str(template.values.get("tokenizer.ggml.tokens")).endswith(" entries"):
        raise ArtifactError(
            f"{template.path} has no tokenizer.ggml.tokens, which llama.cpp needs; name another under like:"
        )
    return template


def _template(like: Path | None, model: Any) -> contextlib.AbstractContextManager[GgufHeader]:
    """Return the header of a GGUF file of the dense model, or one that is made of the model's config."""
    return described(model) if like is None else contextlib.nullcontext(template_of(like))


def _own(like: Path | None, template: GgufHeader, model: Any, tokenizer: Any, folder: Path | None) -> dict[str, Any]:
    """Return what is said of the tokenizer in place of the template's metadata: without a file all of it."""
    if like is not None or (tokenizer is None and folder is None):
        return own_tokenizer(template, tokenizer, folder)
    return tokenizer_metadata(tokenizer, text_config(model).vocab_size, folder)


def _of_each_block(template: GgufHeader) -> list[str]:
    """Return keys with a number for each block, which a file of `deci` has as well, and which change there alone."""
    start, depth = f"{template.architecture}.", template.get("block_count")
    found = [key for key, x in template.values.items() if key.startswith(start) and x == f"{depth} entries"]
    return [] if template.architecture == "deci" else found


def refuse_foreign(model: Any, template: GgufHeader) -> None:
    """Refuse a GGUF file of another model than the transformers model, which may be smaller and on `meta`."""
    ours = text_config(model)
    theirs = text_config(load_skeleton(Checkpoint(str(template.path.parent), template.path)))
    kinds = [{"mistral": "llama"}.get(x.model_type, x.model_type) for x in (ours, theirs)]
    sizes = [head_size(None, x) for x in (ours, theirs)]
    for key, (here, there) in {"model_type": kinds, "head size": sizes}.items():
        if here != there:
            raise template.foreign(key, there, here)
    gguf_settings.refuse_unsayable(ours, theirs, template.as_llama)
    for name in ("num_attention_heads", "num_key_value_heads"):
        here, there = (getattr(x, name, None) for x in (ours, theirs))
        if template.architecture not in FEWER_HEADS and here is not None and here != there:
            raise UnsupportedModelError(
                f"format gguf: {name} is {here} in the model and {there} in {template.path}, and another is not "
                f"written of {template.architecture}; leave kv-groups as they are, or export another format"
            )
    if ours.num_hidden_layers > theirs.num_hidden_layers:
        raise template.foreign("number of blocks", theirs.num_hidden_layers, ours.num_hidden_layers)


@dataclass(frozen=True, eq=False)
class _KeptBlock:
    """What is written of one block: how many units, and which rows or columns, where not all are."""

    fqn: str
    groups: int | None = None
    neurons: int | None = None
    # By name of a tensor in transformers the dimension and the indices.
    rows: Mapping[str, tuple[int, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Alive:
    """A set of units of one block: which contribute anything, and whether their bias does."""

    units: Units
    live: Tensor
    biased: bool


def _alive(block: Block, kinds: Collection[UnitKind]) -> dict[UnitKind, _Alive]:
    """Find what contributes: units whose columns of the output are not all zero."""
    found = {}
    for kind in kinds:
        try:
            sets = find_units(kind, block)
        except UnsupportedModelError:
            continue
        outputs = [(block.linears[n], own) for x in sets for n, own in x.owners.items() if own.dim == 1]
        if len(outputs) != 1 or outputs[0][0].expert is not None:
            continue
        ((linear, own),) = outputs
        live = torch.zeros(sets[0].count, dtype=torch.bool)
        live[own.unit[(linear.held != 0).any(dim=0).cpu()]] = True
        found[kind] = _Alive(sets[0], live, linear.bias is not None and bool((linear.bias != 0).any()))
    return found


def kept_blocks(access: Access, template: GgufHeader) -> tuple[str, list[_KeptBlock]]:
    """Choose what is written of each block: no dead neurons, key/value groups and blocks, as far as a file can say so.

    Returns:
        The architecture of the file: the template's, or `deci` where blocks differ; and the blocks that are left.
    """
    known, every, architecture = architecture_of(access.model), {}, template.architecture
    if _of_each_block(template):
        return architecture, [_KeptBlock(fqn) for fqn in known.blocks]
    kinds: tuple[UnitKind, ...] = ("neurons", "kv-groups") if architecture in FEWER_HEADS else ("neurons",)
    config = text_config(access.model)
    for i, (fqn, module) in enumerate(known.blocks.items()):
        with access.materialise(fqn):
            every[fqn] = _alive(Block(i, fqn, module, known.inside(fqn), (), config), kinds)
    found = {fqn: x for fqn, x in every.items() if not _adds_nothing(x, known.inside(fqn))}
    types = getattr(config, "layer_types", None) or []
    left = [kind for kind, fqn in zip(types, known.blocks, strict=False) if fqn in found]
    if not found or left != types[: len(left)]:  # llama.cpp infers the type of a block from its number
        found = every
    own = architecture in OWN_WIDTHS and all(len(x) == 2 for x in found.values())
    counts = {
        fqn: {kind: _count(kind, x, bare=own and i > 0) for kind, x in alive.items()}
        for i, (fqn, alive) in enumerate(found.items())
    }
    widest = {kind: max(x[kind] for x in counts.values() if kind in x) for x in counts.values() for kind in x}
    differ = any(n != widest[kind] for x in counts.values() for kind, n in x.items())
    if architecture == "qwen2" and own:  # its query matrix is square in llama.cpp
        differ |= widest["kv-groups"] * _per_group(config) * head_size(None, config) != config.hidden_size
    if differ and own:
        architecture = "deci"
    else:
        if differ:
            _log.warning(
                "gguf: the blocks of %s have one width in llama.cpp; all get that of the widest: %s",
                architecture, ", ".join(f"{count} {kind}" for kind, count in widest.items()),
            )  # fmt: skip
        counts = {fqn: {kind: max(widest[kind], 1) for kind in x} for fqn, x in counts.items()}
    return architecture, [_part(fqn, alive, counts[fqn], known.linears) for fqn, alive in found.items()]


def _adds_nothing(found: Mapping[UnitKind, _Alive], linears: Mapping[str, Any]) -> bool:
    """Return whether a block has attention and a feed-forward, nothing else, and both of them are zeros."""
    owned = {name for x in found.values() for name in x.units.owners}
    return len(found) == 2 and owned == {*linears} and not any(x.live.any() or x.biased for x in found.values())


def _count(kind: str, alive: _Alive, *, bare: bool) -> int:
    """Return how many units are written; `bare`: the block may go without attention.

    llama.cpp's deci skips attention where a block has no neurons, and takes the head size from its first block.
    """
    multiple, least = (ROW, ROW) if kind == "neurons" else (1, 0 if bare and not alive.biased else 1)
    return min(max(-(int(alive.live.sum()) // -multiple) * multiple, least), alive.units.count)


def _part(
    fqn: str, found: Mapping[UnitKind, _Alive], counts: Mapping[UnitKind, int], linears: Mapping[str, Any]
) -> _KeptBlock:
    """Name the rows and columns of a block that are written: those that live, and the first of the others."""
    rows = {}
    for kind, alive in found.items():
        order = torch.argsort((~alive.live).to(torch.int8), stable=True)[: counts[kind]]
        keep = torch.zeros(alive.units.count + 1, dtype=torch.bool)
        keep[order] = keep[-1] = True  # the last: rows of no unit
        if bool(keep.all()):
            continue
        for name, own in alive.units.owners.items():
            index = keep[own.unit].nonzero().flatten()
            rows[f"{name}.weight"] = (1 - own.dim if linears[name].transposed else own.dim, index)
            if own.dim == 0 and linears[name].bias is not None:
                rows[f"{name}.bias"] = (0, index)
    return _KeptBlock(fqn, counts.get("kv-groups"), counts.get("neurons"), rows)


def _per_group(config: Any) -> int:
    return int(config.num_attention_heads // config.num_key_value_heads)


def _heads(config: Any, block: _KeptBlock | None) -> dict[str, int]:
    """Return the settings of a config that are others in a block as it is written."""
    groups = None if block is None else block.groups
    return {} if groups is None else {"num_attention_heads": groups * _per_group(config), "num_key_value_heads": groups}


@dataclass(frozen=True, eq=False)
class _Written:
    """One tensor of the file, with its name, shape, rows first, and type there."""

    name: str
    source: str  # in transformers' model; empty of one that is copied from the template
    block: _KeptBlock | None  # None outside the blocks
    shape: tuple[int, ...]
    stored: str


class _FileLayout:
    """Which tensors of one model lie in a file, under which names and in which shapes."""

    def __init__(self, model: Any, template: GgufHeader, architecture: str) -> None:
        self.model, self.template = model, template
        self.config = text_config(model).to_dict()
        self.readers = Readers(model, template.architecture, "llama" if architecture == "deci" else None)
        self.largest: dict[str, tuple[int, ...]] = {}  # shapes, of blocks by the name after the block's number
        for name, shape in template.shapes.items():
            key = BLOCK.sub("", name)
            self.largest[key] = tuple(map(max, shape, self.largest.get(key, shape)))
        self.sources = dict(self.readers.sources)
        self._refuse_lost()
        # What scales the queries of a Gemma, and by how much, where llama.cpp divides them by another number.
        self.queries = {"gemma2": ".attn_q.weight", "gemma3": ".attn_q_norm.weight"}.get(template.architecture, "\0")
        self.query_factor = 1.0

    def _refuse_lost(self) -> None:
        """Refuse tensors of the model without a name in the file, and of the file without one in the model."""
        held, largest = self.model.state_dict(keep_vars=True), self.largest
        named = {id(held[source]) for source in self.sources.values() if source in held}
        if lost := [name for name, x in held.items() if id(x) not in named]:
            raise UnsupportedModelError(
                f"format gguf: {lost[0]} of {type(self.model).__name__} has no place in GGUF files of "
                f"{self.template.architecture} that transformers reads; export another format"
            )
        keys = {BLOCK.sub("", name) for name in self.sources}
        head = self.model.get_output_embeddings()
        tied = head is None or head.weight is self.model.get_input_embeddings().weight
        if "output.weight" not in largest and tied and self.template.architecture not in gguf_settings.OWN_HEAD:
            self.sources.pop("output.weight", None)
        odd = [key for key in keys - {*largest} if key != "output.weight"]
        odd += [key for key in {*largest} - keys if not key.startswith("rope_f")]
        if odd:
            where = "lacks" if odd[0] not in largest else "has"
            raise ArtifactError(
                f"{self.template.path} {where} {odd[0]}, unlike {type(self.model).__name__}; give the GGUF file of the "
                "dense model"
            )

    def tensor(self, name: str) -> Tensor:
        """Return a parameter or buffer of the model by name, or of the block that is materialised."""
        home, _, own = name.rpartition(".")
        found: Tensor = getattr(self.model.get_submodule(home), own)
        return found.detach()

    def written(self, blocks: Sequence[_KeptBlock], kind: str) -> list[_Written]:
        """List the file's tensors, those of the blocks at its end, block by block."""
        numbers = [*architecture_of(self.model).blocks]
        kept = {numbers.index(x.fqn): (i, x) for i, x in enumerate(blocks)}
        found: dict[int, list[_Written]] = defaultdict(list)
        copied = (name for name in self.template.shapes if name.startswith("rope_f"))
        found[-1] = [_Written(name, "", None, self.template.shapes[name], "F32") for name in copied]
        for name, source in self.sources.items():
            key, match = BLOCK.sub("", name), BLOCK.match(name)
            i, block = kept.get(int(match[1]), (0, None)) if match else (-1, None)
            if match and (block is None or (block.groups == 0 and key.startswith("attn_"))):
                continue
            shape = [*self.tensor(source).shape]
            dim, index = (block and block.rows.get(source)) or (0, range(shape[0]))
            shape[dim] = len(index)
            in_file = self.readers.shape(name, tuple(shape), _heads(text_config(self.model), block))
            known = self.largest.get(key, in_file)
            if any(here > there for here, there in zip(in_file, known, strict=True)):
                raise self.template.foreign(name, [*known], [*in_file])
            stored = stored_type(name, in_file, kind, tied="output.weight" not in self.sources)
            found[i].append(_Written(f"blk.{i}.{key}" if match else name, source, block, in_file, stored))
        return [x for i in sorted(found) for x in found[i]]

    def numbers(self, architecture: str, blocks: Sequence[_KeptBlock], tensors: Sequence[_Written]) -> dict[str, Any]:
        """Return the metadata that changes, by key."""
        template, config = self.template, self.config
        shapes = {x.name: x.shape for x in tensors}
        if scalar := config.get("query_pre_attn_scalar"):
            theirs = gguf_settings.query_scalar(template, len(blocks))
            self.query_factor = math.sqrt(theirs / scalar)
        if each := _of_each_block(template):
            if any(shapes.get(name) != shape for name, shape in template.shapes.items()):
                raise UnsupportedModelError(
                    f"format gguf: {each[0]} of {template.path} has a number for each block, which compressx does not "
                    "change; export a model with all of its blocks and widths, or another format"
                )
            return {}
        found: dict[str, Any] = {"block_count": len(blocks)}
        length = template.get("context_length", 0)
        if (context := gguf_settings.context_of(text_config(self.model), template.architecture) or length) < length:
            _log.warning("gguf: context_length is %d, the model's window: llama.cpp has none for %s", context,
                         template.architecture)  # fmt: skip
            found["context_length"] = context
        of_all: Callable[[list[int]], Any] = list if architecture == "deci" else max
        for key, name in {"": "ffn_down", "expert_": "ffn_down_exps", "expert_shared_": "ffn_down_shexp"}.items():
            widths = [shapes.get(f"blk.{i}.{name}.weight", (0,))[-1] for i in range(len(blocks))]
            if any(widths):
                found[f"{key}feed_forward_length"] = of_all(widths)
        if experts := [x.shape[0] for x in tensors if "ffn_down_exps.weight" in x.name]:
            found |= {"expert_count": experts[0], "expert_used_count": config["num_experts_per_tok"]}
        if template.architecture in FEWER_HEADS:
            groups = [config["num_key_value_heads"] if x.groups is None else x.groups for x in blocks]
            heads = [x * _per_group(text_config(self.model)) for x in groups]
            size = head_size(None, text_config(self.model))
            found |= {"attention.head_count": of_all(heads), "attention.head_count_kv": of_all(groups),
                      "attention.key_length": size, "attention.value_length": size}  # fmt: skip
        return {f"{architecture}.{key}": x for key, x in found.items()}


def export_gguf(
    access: Access, template: GgufHeader, kind: str, path: Path, own: Mapping[str, Any] | None = None
) -> str:
    """Write a model to a GGUF file, one tensor at a time, and return a line about it.

    `own` is metadata of the tokenizer in place of the template's. Refused are a template of another
    model, values that float16 cannot hold, and tensors that transformers cannot read from such a file.
    """
    from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType, quants

    class Writer(GGUFWriter):  # type: ignore[misc] # untyped
        """Also writes values that are packed already."""

        def _pack_val(self, val: Any, *args: Any, **kwargs: Any) -> Any:
            return val if isinstance(val, bytes) else super()._pack_val(val, *args, **kwargs)

    refuse_foreign(access.model, template)
    architecture, blocks = kept_blocks(access, template)
    with access.materialise(OUTSIDE):  # where a streamed model has its head tied
        layout = _FileLayout(access.model, template, architecture)
    tensors = layout.written(blocks, kind)
    changed = {**layout.numbers(architecture, blocks, tensors), **(own or {})}
    with written_whole(path) as beside, contextlib.closing(Writer(beside, architecture)) as writer:
        for key, x in template.fields.items():
            new = re.sub(f"^{re.escape(template.architecture)}[.]", f"{architecture}.", key)
            if not _NOT_COPIED.fullmatch(key) and new not in changed:
                writer.add_key_value(new, b"".join(part.tobytes() for part in x.parts[2:]), GGUFValueType.UINT8)
        add: Mapping[type, Any] = {list: writer.add_array, str: writer.add_string, bool: writer.add_bool}
        for key, value in changed.items():
            if value is not None:
                add.get(type(value), writer.add_uint32)(key, value)
        writer.add_file_type(LlamaFileType[f"MOSTLY_{kind}"])
        writer.add_quantization_version(GGML_QUANT_VERSION)
        for x in tensors:
            size = stored_bytes(x.shape, x.stored)
            writer.add_tensor_info(x.name, x.shape, np.float32, size, GGMLQuantizationType[x.stored])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for x, values in zip(tensors, _values(access, layout, tensors), strict=True):
            writer.write_tensor_data(quants.quantize(values, GGMLQuantizationType[x.stored]))
    return _described(architecture, blocks)


def _values(access: Access, layout: _FileLayout, tensors: Sequence[_Written]) -> Iterator[np.ndarray]:
    """Yield each tensor's values as they lie in the file, float32, while its block is materialised."""
    copied = layout.template.arrays
    for fqn, group in itertools.groupby(tensors, lambda x: OUTSIDE if x.block is None else x.block.fqn):
        with access.materialise(fqn):
            for x in group:
                if not x.source:
                    yield np.array(copied[x.name], np.float32)
                    continue
                found = layout.tensor(x.source)
                if x.block is not None and x.source in x.block.rows:
                    dim, index = x.block.rows[x.source]
                    found = found.index_select(dim, index.to(found.device))
                heads = _heads(text_config(layout.model), x.block)
                values = layout.readers.stored(x.name, found.float().cpu().numpy(), x.shape, heads)
                if x.name.endswith(layout.queries):
                    values = values * layout.query_factor
                if x.stored not in {"F32", "BF16"} and max(values.max(), -values.min()) > _MOST:
                    raise ArtifactError(f"format gguf: {x.source} has values beyond {_MOST:.0f}, which {x.stored} "
                                        "cannot hold; choose the type BF16")  # fmt: skip
                yield np.ascontiguousarray(values)


def _described(architecture: str, blocks: Sequence[_KeptBlock]) -> str:
    """Say what a file holds, such as `llama, 30 blocks, 512 neurons, 3 key/value groups`."""
    parts = [f"{architecture}, {len(blocks)} blocks"]
    for values, name in (([x.neurons for x in blocks], "neurons"), ([x.groups for x in blocks], "key/value groups")):
        if known := [x for x in values if x is not None]:
            low, high = min(known), max(known)
            parts.append(f"{low} {name}" if low == high else f"{low} to {high} {name}")
    return ", ".join(parts)


class GgufExporter:
    """Writes one GGUF file."""

    loads = "model.gguf"

    def __init__(self, options: GgufOptions) -> None:
        self.options = options

    def check(self, planned: PlannedModel) -> None:
        """Refuse what cannot be written, before weights are read."""
        with self._planned(planned) as (template, _, _):
            if planned.own_widths and template.architecture not in OWN_WIDTHS:
                raise UnsupportedModelError(
                    f"format gguf: llama.cpp has one width for all blocks of {template.architecture}, and an "
                    "allocation gives each its own; drop allocation, and give each rule its sparsity"
                )

    def tensor_bytes(self, planned: PlannedModel) -> dict[str, int]:
        """Return the bytes of each tensor, and under the empty name some 4096 too much, for lists of widths."""
        with self._planned(planned) as (template, own, tensors):
            weights = sum(int(x.nbytes) for x in template.arrays.values())
            found = {"": 4096 + template.path.stat().st_size - weights}
        said = itertools.chain.from_iterable(x if isinstance(x, list) else [x] for x in own.values())
        found[""] += sum(8 + len(x.encode()) if isinstance(x, str) else 4 for x in said)
        for x in tensors:
            found[x.source] = found.get(x.source, 0) + stored_bytes(x.shape, x.stored)
        return found

    def export(self, model: FinishedModel, folder: Path) -> str:
        like = self.options.like or model.source
        with _template(like, model.access.model) as template:
            own = _own(like, template, model.access.model, model.tokenizer, model.folder)
            told = export_gguf(model.access, template, self.options.type, folder / self.loads, own=own)
        named = ", ".join(key.rpartition(".")[2] for key in own) if like is not None else ""
        return told + (f"; the model's own instead of the template's: {named}" if named else "")

    @contextlib.contextmanager
    def _planned(self, planned: PlannedModel) -> Iterator[tuple[GgufHeader, dict[str, Any], list[_Written]]]:
        """Yield the template, what is said of the tokenizer in its place, and the tensors of the file of a model."""
        like = self.options.like or planned.source
        with _template(like, planned.model) as template:
            refuse_foreign(planned.model, template)
            own = _own(like, template, planned.model, planned.tokenizer, None)
            kept = [_KeptBlock(fqn) for fqn in find_blocks(planned.model)]
            layout = _FileLayout(planned.model, template, template.architecture)
            yield template, own, layout.written(kept, self.options.type)


@hookimpl
def compressx_exporters() -> list[ExporterSpec]:
    """Offer the exporter to recipes."""
    summary = "one file for llama.cpp, without units that are all zeros"
    return [ExporterSpec("gguf", summary, GgufOptions, GgufExporter, own_widths=True)]
