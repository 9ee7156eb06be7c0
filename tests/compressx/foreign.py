"""A model of an architecture that transformers does not have, with Python code of its own."""

from __future__ import annotations

import json
from pathlib import Path

from compressx.testing import save_tiny_model, tiny_text

_CONFIG = """
from transformers import PretrainedConfig

class TrunkConfig(PretrainedConfig):
    model_type = "trunk"
    {attribute_map}

    def __init__(self, n_stages=3, tie_word_embeddings=True, **values):
        self.vocab_size, self.hidden_size, self.n_stages = 128, 64, n_stages
        self.num_attention_heads, self.max_position_embeddings = 4, 128
        super().__init__(tie_word_embeddings=tie_word_embeddings, **values)
"""

_LAYERS = """
import torch
from torch import nn

class MyLinear(nn.Module):
    def __init__(self, columns, rows, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) * 0.1)
        self.bias = nn.Parameter(torch.zeros(rows))

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)

class BufferLinear(nn.Module):
    def __init__(self, columns, rows, bias=True):
        super().__init__()
        self.register_buffer("matrix", torch.zeros(rows, columns))

    def forward(self, x):
        return x @ self.matrix.T

class Stage(nn.Module):
    def __init__(self, config, linear):
        super().__init__()
        width = config.hidden_size
        self.heads, self.norm, self.norm2 = config.num_attention_heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = linear(width, 3 * width), linear(width, width)
        self.widen, self.narrow = linear(width, 2 * width), linear(2 * width, width)

    def forward(self, hidden_states, **kwargs):
        x = hidden_states
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (y.view(shape).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(a.transpose(1, 2).reshape(x.shape))
        return x + self.narrow(torch.relu(self.widen(self.norm2(x))))
"""

_MODEL = """
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_trunk import TrunkConfig
from .layers_trunk import MyLinear, BufferLinear, Stage

class Trunk(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.stages = nn.ModuleList(Stage(config, kind) for kind in {kinds}[: config.n_stages])

class TrunkForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TrunkConfig
    base_model_prefix = "trunk"
    _tied_weights_keys = {{"lm_head.weight": "trunk.embed.weight"}}

    def __init__(self, config):
        super().__init__(config)
        self.trunk = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.trunk.embed

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids=None, attention_mask=None, use_cache=None, **kwargs):
        x = self.trunk.embed(input_ids)
        for stage in self.trunk.stages:
            x = stage(x)
        return CausalLMOutput(logits=self.lm_head(x))
"""

ATTRIBUTE_MAP = 'attribute_map = {"num_hidden_layers": "n_stages"}'


def save_foreign(
    folder: Path, kinds: tuple[str, ...] = ("nn.Linear",) * 3, attribute_map: str = ATTRIBUTE_MAP
) -> Path:  # fmt: skip
    """Save such a model with random weights and a tokenizer, and a text of words that it knows beside the folder.

    Args:
        folder: to write.
        kinds: the class of the linears of each of its blocks.
        attribute_map: the line of its config's class that says which number is that of its blocks.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    save_tiny_model(folder, "llama")  # for the tokenizer
    (folder / "model.safetensors").unlink()
    (folder / "generation_config.json").unlink()
    (folder / "configuration_trunk.py").write_text(
        f"# of {kinds}, since transformers takes equal classes for one\n" + _CONFIG.format(attribute_map=attribute_map)
    )
    (folder / "layers_trunk.py").write_text(_LAYERS)
    (folder / "modeling_trunk.py").write_text(_MODEL.format(kinds=f"[{', '.join(kinds)}]"))
    auto = {"AutoConfig": "configuration_trunk.TrunkConfig", "AutoModelForCausalLM": "modeling_trunk.TrunkForCausalLM"}
    config = {"model_type": "trunk", "n_stages": len(kinds), "auto_map": auto}
    (folder / "config.json").write_text(json.dumps(config))
    settings = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    AutoModelForCausalLM.from_config(settings, trust_remote_code=True).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["TrunkForCausalLM"]}))
    folder.with_name("text.txt").write_text(tiny_text())
    return folder
