"""What lesson 18 measures: bytes, losses and equal bits of small runs, which are the same on every machine.

The notebook reads them from `data/claims.json`; `python -m tests.claims.measuring FILE` writes
them anew (about two minutes on two cores). No time is among them.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdplab.common.files import write_whole
from fsdplab.common.names import OVER_ALL_RANKS
from fsdplab.common.places import shared_folder
from fsdplab.sessions import call_on_ranks
from fsdplab.teaching.lessons.nb18_claims import lesson
from fsdplab.teaching.lessons.nb18_claims.lesson import told

_ON_RANKS = Path(__file__).with_name("on_ranks.py")
_LESSONS = Path(lesson.__file__).parents[1]
_TIME_LIMIT = 600.0
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "FSDP_VERSION": "2"}
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
_FLAGS = (
    "--model_name_or_path", "base", "--train_file", "rows.jsonl", "--fsdp", "full_shard auto_wrap",
    "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "8", "--learning_rate", "1e-2",
    "--max_steps", "6", "--save_steps", "6", "--logging_steps", "1", "--report_to", "none", "--disable_tqdm", "True",
    "--use_cpu",
)  # fmt: skip


def measured() -> dict[str, Any]:
    """Every figure by the name of what was done."""
    found: dict[str, Any] = {"made_by": _made_by()}
    for name, measure in MEASUREMENTS.items():
        print(name, file=sys.stderr)
        found[name] = measure()
    return found


def _made_by() -> dict[str, str]:
    import torch

    return {
        "command": "python -m tests.claims.measuring data/claims.json",
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "ranks": "processes on CPU cores",
    }


def _strategies() -> dict[str, Any]:
    return {name: told(strategy=name) for name in OVER_ALL_RANKS}


def _torch_ddp() -> dict[str, Any]:
    return told(strategy="no_shard", engine="torch-ddp")


def _ranks() -> dict[str, Any]:
    return {str(ranks): told(world_size=ranks) for ranks in (1, 2, 4)}


def _checkpointing() -> dict[str, Any]:
    return {
        f"{strategy}, {checkpoint}": told(batch_size=8, strategy=strategy, checkpoint=checkpoint)
        for strategy in ("no_shard", "full_shard")
        for checkpoint in ("none", "full")
    }


def _sequences() -> dict[str, Any]:
    """Twice the tokens, and twice the ranks."""
    of = {"64 tokens, 2 ranks": (64, 2), "128 tokens, 2 ranks": (128, 2), "128 tokens, 4 ranks": (128, 4)}
    return {name: told(sequence_length=tokens, world_size=ranks) for name, (tokens, ranks) in of.items()}


def _units() -> dict[str, Any]:
    return {units: told(model="gpt-20m", units=units) for units in ("model", "auto", "linear")}


def _micro_batches() -> dict[str, int]:
    return {name: told(strategy=name, micro_batches=8)["bytes"] for name in OVER_ALL_RANKS}


def _offload() -> dict[str, Any]:
    return {where: told(offload=where) for where in ("none", "cpu")}


def _checkpoints() -> dict[str, Any]:
    """Saved by 4 ranks, loaded by 2, 1 and 3."""
    with tempfile.TemporaryDirectory() as folder:
        held = _call("saved", 4, folder=folder)[0]
        return {"rank 0 holds": held} | {f"on {n}": _call("loaded", n, folder=folder) for n in (2, 1, 3)}


def _drive() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # the temporary folder may be memory
        return dict(_call("on_a_drive", 2, folder=folder)[0])


def _curves() -> dict[str, Any]:
    return dict(_call("curves", 2, steps=200)[0])


def _composed() -> dict[str, float]:
    """How far the farthest parameter of notebook 16's models ends from the twin's."""
    on_mesh = _LESSONS / "nb16_composition" / "on_ranks.py"
    with tempfile.TemporaryDirectory() as workspace:
        tensor = _call("tensor", 4, on_mesh, workspace=workspace)[0]
        experts = _call("experts", 4, on_mesh, workspace=workspace, divide=4.0)[0]
        pipelines = _call("stages", 4, on_mesh, workspace=workspace)[0]
    return {
        "tensor parallelism": tensor["drift"],
        "experts": experts["drift"],
        "a pipeline": max(each["drift"] for each in pipelines.values()),
    }


def _muon() -> dict[str, int]:
    """Collectives of a step of Muon on notebook 21's shards."""
    found = _call("collectives_of_a_step", 2, _LESSONS / "nb21_whole_matrices" / "on_ranks.py")[0]
    return {name: sum(kinds.values()) for name, kinds in found.items()}


def _layers() -> dict[str, str]:
    return dict(_call("layers", 2)[0])


def _finetune() -> dict[str, list[float]]:
    """The losses of docs/examples/finetune.py on this engine and, without its one line, on PyTorch's."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    source = (shared_folder("data").parent / "docs" / "examples" / "finetune.py").read_text(encoding="utf-8")
    line = "torch.distributed.fsdp.fully_shard = fsdplab.engine.fully_shard\n"
    assert line in source, "the example says with one line whose engine trains"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
        )
        LlamaForCausalLM(config).save_pretrained(folder / "base")
        rows = ({"input_ids": [(7 * row + at) % 128 for at in range(8 + row % 3)]} for row in range(64))
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
        return {"lab": _losses(folder, "lab", source), "torch": _losses(folder, "torch", source.replace(line, ""))}


def _losses(folder: Path, engine: str, text: str) -> list[float]:
    (folder / f"with_{engine}.py").write_text(text, encoding="utf-8")
    words = [*_TORCHRUN, f"with_{engine}.py", *_FLAGS, "--output_dir", engine]
    subprocess.run([sys.executable, *words], cwd=folder, check=True, env={**os.environ, **_ONE_THREAD})
    state = json.loads((folder / engine / "checkpoint-6" / "trainer_state.json").read_text())
    return [each["loss"] for each in state["log_history"] if "loss" in each]


def _call(function: str, ranks: int, file: Path = _ON_RANKS, **payload: Any) -> list[Any]:
    return call_on_ranks(file, function, world_size=ranks, payload=payload, time_limit=_TIME_LIMIT)


MEASUREMENTS: dict[str, Callable[[], Any]] = {
    "strategies": _strategies,
    "torch_ddp": _torch_ddp,
    "ranks": _ranks,
    "checkpointing": _checkpointing,
    "sequences": _sequences,
    "units": _units,
    "micro_batches": _micro_batches,
    "offload": _offload,
    "checkpoints": _checkpoints,
    "drive": _drive,
    "curves": _curves,
    "composed": _composed,
    "muon": _muon,
    "layers": _layers,
    "finetune": _finetune,
}


if __name__ == "__main__":
    write_whole(Path(sys.argv[1]), json.dumps(measured(), indent=1) + "\n")
