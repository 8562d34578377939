"""What is said about using it: precision, composition, drives, layers, debugging, the workflow of others."""

from __future__ import annotations

import json
from statistics import fmean

from fsdplab.common.places import shared_folder

from .claim import Finding, Measured, Subject, conditional_if, confirmed_if

CLAIMS = Subject()
_LAST = 20  # steps whose losses are averaged


@CLAIMS.claim("C15", "measured", "06_a_whole_model")
def _(measured: Measured) -> Finding:
    """The whole model as one unit loses the memory saving; a unit for every linear layer wastes time on tiny
    collectives.
    """
    told = measured["units"]
    peaks = {units: sum(each["peak"].values()) for units, each in told.items()}
    counts = {units: sum(each["collectives"].values()) for units, each in told.items()}
    listed = ", ".join(
        f"{units} {peaks[units] / 1e6:.0f} MB and {counts[units]} collectives a step"
        for units in ("model", "auto", "linear")
    )
    text = f"gpt-20m on 2 ranks by units: {listed} (auto: each block)"
    return confirmed_if(peaks["model"] > 1.1 * peaks["auto"] and counts["linear"] > 3 * counts["auto"], text)


@CLAIMS.claim("C19", "measured", "13_precision_checkpointing_offload")
def _(measured: Measured) -> Finding:
    """bf16 with fp32 masters keeps the training curve."""
    ends = {name: fmean(losses[-_LAST:]) for name, losses in measured["curves"].items()}
    usual, masters, alone = ends["fp32"], ends["bf16, fp32 masters"], ends["bf16 alone"]
    text = (
        f"gpt-tiny after {len(measured['curves']['fp32'])} steps, mean loss of the last {_LAST}: fp32 {usual:.3f}, bf16"
        f" with masters {masters:.3f}, bf16 alone {alone:.3f}: there small updates round to nothing"
    )
    return confirmed_if(abs(masters - usual) < 0.02 and alone - usual > abs(masters - usual), text)


@CLAIMS.claim("C27", "measured", "16_composition")
def _(measured: Measured) -> Finding:
    """FSDP composes with tensor and pipeline parallelism."""
    drifts = measured["composed"]
    listed = ", ".join(f"with {what} {f'{drift:.0e}' if drift else 'equal'}" for what, drift in drifts.items())
    text = f"farthest parameter from the unsharded twin's, on 4 ranks: {listed}"
    return confirmed_if(max(drifts.values()) < 1e-4, text)


@CLAIMS.claim("C28", "measured", "17_to_fully_shard")
def _(measured: Measured) -> Finding:
    """`--fsdp "full_shard auto_wrap" --gradient_accumulation_steps 8` is all that users of Trainer need."""
    ours, torchs = measured["finetune"]["lab"], measured["finetune"]["torch"]
    equal = ours == torchs
    text = (
        f"docs/examples/finetune.py takes these flags: {len(ours)} steps with LoRA have"
        f" {'the same losses' if equal else 'other losses'} on this engine and on PyTorch's. Transformers 5 calls the"
        " text after --fsdp deprecated: `--fsdp True` and a file for --fsdp_config take its place"
    )
    return conditional_if(equal, text)


@CLAIMS.claim("C29", "measured", "13_precision_checkpointing_offload")
def _(measured: Measured) -> Finding:
    """Larger systems offload to NVMe and shard experts."""
    drive, experts = measured["drive"], measured["composed"]["experts"]
    text = (
        f"two steps of gpt-tiny with {drive['bytes'] / 1e6:.2f} MB of slices and optimizer state of a rank in files end"
        f" with {'equal' if drive['equal'] else 'other'} bits; experts sharded over ranks end {experts:.0e} from the"
        " twin"
    )
    return confirmed_if(drive["equal"] and experts < 1e-4, text)


@CLAIMS.claim("C32", "measured", "17_to_fully_shard")
def _(measured: Measured) -> Finding:
    """Not all custom layers are compatible with FSDP."""
    layers = measured["layers"]
    text = (
        "; ".join(f"{name}: {what}" for name, what in layers.items())
        + ". A parameter must be read in the forward of its own unit"
    )
    return conditional_if(
        "are the twin's" in layers["tied weights"] and "refused" in layers["a weight read outside"], text
    )


@CLAIMS.claim("C33", "measured", "14_failures")
def _(measured: Measured) -> Finding:
    """Debugging is harder than under DDP."""
    told = json.loads((shared_folder("data") / "failures-14" / "torchrun.json").read_text(encoding="utf-8"))["faults"]
    silent = [name for name, row in told.items() if row["exit"] == 0]
    text = (
        f"{len(silent)} of {len(told)} faults in a sharded job end with exit code 0 under torchrun"
        f" ({', '.join(silent)}). Units that are not waited for or not resharded are sharding's own; the others are as"
        " silent under DDP"
    )
    return conditional_if(0 < len(silent) < len(told), text)
