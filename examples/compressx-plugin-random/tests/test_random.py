import torch
from compressx_plugin_random import Options, RandomPruner, compressx_pruners

from compressx import Block, Linear, Unstructured, load_plugins
from compressx.testing import check_plugin

(SPEC,) = compressx_pruners()


def mask(seed: int) -> torch.Tensor:
    linear = Linear("fc", torch.nn.Linear(16, 8))
    block = Block(0, "block", linear.module, {"fc": linear}, (), None)
    return RandomPruner(Options(seed=seed)).prune(block, {"fc": Unstructured(0.5, "layer")}, {})["fc"].keep


def test_the_pruner_keeps_every_promise():
    check_plugin(SPEC)


def test_another_seed_gives_another_mask():
    assert torch.equal(mask(0), mask(0))
    assert not torch.equal(mask(0), mask(1))


def test_installing_the_package_makes_the_pruner_known():
    assert "random" in load_plugins().offers["pruners"]
