"""Hash the results of six recipes on tiny models, to check that a refactoring does not change them.

python benchmarks/fingerprints.py > before.txt; ...; python benchmarks/fingerprints.py | diff before.txt -

Runs in one thread. Hashes are comparable only on one machine with one build of torch. Seconds, date, memory, hardware,
versions, command, paths and the recipe are left out of `report.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

import compressx
from compressx.testing import save_tiny_model, tiny_text

QUERY_KEY = {"llama": ["*.q_proj", "*.k_proj"], "mixtral": ["*.q_proj", "*.k_proj"], "gpt2": ["*.c_attn"]}
ALL = {"targets": ["*"]}
LEFT_OUT = {
    "seconds", "peak_memory_bytes", "peak_gpu_memory_bytes", "versions", "plugins", "model", "compressx", "figures",
    "date", "command", "exports", "hardware", "calibration", "arithmetic",
}  # fmt: skip


def recipes(architecture: str) -> dict[str, dict[str, Any]]:
    """Return the six recipes by name, without model, text and output."""
    half = {"sparsity": 0.5}
    attention = {"targets": QUERY_KEY[architecture], "pruner": "attnprune"}
    return {
        "wanda": {"prune": [{**ALL, "pruner": "wanda", **half}]},
        "sparsegpt-2of4": {"prune": [{**ALL, "pruner": "sparsegpt", "pattern": "2:4"}]},
        "alps": {"prune": [{**ALL, "pruner": "alps", **half}]},
        "attnprune-sparsegpt": {"prune": [{**attention, **half}, {**ALL, "pruner": "sparsegpt", **half}]},
        "allocated-reconstructed": {
            "prune": [attention, {**ALL, "pruner": "sensitivity", "group": "joint"}],
            "allocation": {"method": "attention-aware", "target": 0.5},
            "reconstruct_block": {"passes": 2},
        },
        "finetune": {
            "prune": [{**ALL, "pruner": "wanda", **half}],
            "finetune": {"steps": 4, "batch_size": 2},
        },
    }


def without_times(value: Any) -> Any:
    """Return a part of a report without what differs from run to run."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in LEFT_OUT}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def fingerprint(output: Path) -> list[str]:
    """Return the hashes of a run's weights, masks and report."""
    report = json.dumps(without_times(json.loads((output / "report.json").read_text())), sort_keys=True)
    contents = [(output / name).read_bytes() for name in ("model/model.safetensors", "masks.safetensors")]
    return [hashlib.sha256(content).hexdigest() for content in (*contents, report.encode())]


def main() -> None:
    """Print one line for each model and recipe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--keep", type=Path, help="folder for the outputs; temporary by default")
    keep = parser.parse_args().keep
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        text = folder / "text.txt"
        text.write_text(tiny_text(words=2000))
        dataset = {"text": str(text)}
        for architecture in QUERY_KEY:
            model = save_tiny_model(folder / architecture, architecture)
            for name, recipe in recipes(architecture).items():
                output = folder / f"{architecture}-{name}"
                compressx.run(
                    {
                        "model": {"path": str(model)},
                        "compute_dtype": "float32",
                        "calibration": {"dataset": dataset, "samples": 16, "sequence_length": 32, "batch_size": 4},
                        "evaluate": {"token_perplexity": {"dataset": dataset, "sequence_length": 32, "samples": 8}},
                        **recipe,
                        "output": str(output),
                    }
                )
                print(architecture, name, *(digest[:16] for digest in fingerprint(output)), flush=True)


if __name__ == "__main__":
    main()
