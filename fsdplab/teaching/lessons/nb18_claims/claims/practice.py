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
    peaks, counts, listed = {}, {}, []
    for units in ("model", "auto", "linear"):
        run = measured["units"][units]
        # bytes of all categories at the peak
        peaks[units] = sum(run["peak"].values())
        counts[units] = sum(run["collectives"].values())
        listed.append(f"{units} {peaks[units] / 1e6:.0f} MB and {counts[units]} collectives a step")
    text = f"gpt-20m on 2 ranks by units: {', '.join(listed)} (auto: each block)"
    return confirmed_if(peaks["model"] > 1.1 * peaks["auto"] and counts["linear"] > 3 * counts["auto"], text)


@CLAIMS.claim("C19", "measured", "13_precision_checkpointing_offload")
def _(measured: Measured) -> Finding:
    """bf16 with fp32 masters keeps the training curve."""
    # losses of single steps scatter by more than the curves differ
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
    listed = []
    for what, drift in drifts.items():
        # the largest difference of a parameter after the steps
        distance = f"{drift:.0e}" if drift else "equal"
        listed.append(f"with {what} {distance}")
    text = f"farthest parameter from the unsharded twin's, on 4 ranks: {', '.join(listed)}"
    return confirmed_if(max(drifts.values()) < 1e-4, text)


@CLAIMS.claim("C28", "measured", "17_to_fully_shard")
def _(measured: Measured) -> Finding:
    """`--fsdp "full_shard auto_wrap" --gradient_accumulation_steps 8` is all that users of Trainer need."""
    lab, torchs = measured["finetune"]["lab"], measured["finetune"]["torch"]
    equal = lab == torchs
    losses = "the same losses" if equal else "other losses"
    text = (
        f"docs/examples/finetune.py takes these flags: {len(lab)} steps with LoRA have {losses} on this engine and on"
        " PyTorch's. Transformers 5 calls the text after --fsdp deprecated: `--fsdp True` and a file for --fsdp_config"
        " take its place"
    )
    return conditional_if(equal, text)


@CLAIMS.claim("C29", "measured", "13_precision_checkpointing_offload")
def _(measured: Measured) -> Finding:
    """Larger systems offload to NVMe and shard experts."""
    drive, experts = measured["drive"], measured["composed"]["experts"]
    bits = "equal bits" if drive["equal"] else "other bits"
    text = (
        f"two steps of gpt-tiny with {drive['bytes'] / 1e6:.2f} MB of slices and optimizer state of a rank in files end"
        f" with {bits}; experts sharded over ranks end {experts:.0e} from the twin"
    )
    return confirmed_if(drive["equal"] and experts < 1e-4, text)


@CLAIMS.claim("C32", "measured", "17_to_fully_shard")
def _(measured: Measured) -> Finding:
    """Not all custom layers are compatible with FSDP."""
    layers = measured["layers"]
    listed = "; ".join(f"{name}: {what}" for name, what in layers.items())
    text = f"{listed}. A parameter must be read in the forward of its own unit"
    # the record holds a sentence for each kind of layer
    ties_work = "are the twin's" in layers["tied weights"]
    outside_is_refused = "refused" in layers["a weight read outside"]
    return conditional_if(ties_work and outside_is_refused, text)


@CLAIMS.claim("C33", "measured", "14_failures")
def _(measured: Measured) -> Finding:
    """Debugging is harder than under DDP."""
    path = shared_folder("data") / "failures-14" / "torchrun.json"
    faults = json.loads(path.read_text(encoding="utf-8"))["faults"]
    # a job that trains wrongly and ends as a sound one does
    silent = [name for name, row in faults.items() if row["exit"] == 0]
    text = (
        f"{len(silent)} of {len(faults)} faults in a sharded job end with exit code 0 under torchrun"
        f" ({', '.join(silent)}). Units that are not waited for or not resharded are sharding's own; the others are as"
        " silent under DDP"
    )
    return conditional_if(0 < len(silent) < len(faults), text)
