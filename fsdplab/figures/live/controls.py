"""The controls of the planner's page: fields of a plan, the values of each, and how a choice becomes a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from fsdplab.common.names import STRATEGIES
from fsdplab.common.sizes import parse_size
from fsdplab.planning.as_flags import Changes
from fsdplab.planning.hardware import GPUS, NETWORKS
from fsdplab.planning.plan_spec import CHECKPOINTINGS, LOSSES, OPTIMIZERS, PlanSpec, flag_of
from fsdplab.planning.planner import plan_spec
from fsdplab.workloads.shapes import SHAPES

USUAL = "usual"  # of the network and the host: what the tables have for the GPU; of a frozen base: that of computing
# whole nodes of eight GPUs, near each other where remedies lie
_GPUS = (1, 2, 4, 8, *range(16, 129, 8), 160, 192, 224, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192, 16_384)
# what smaller micro-batches make of one and of each other
_PASSES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
_HOSTS = ("128GB", "256GB", "512GB", "1TB", "1.5TB", "2TB", "4TB")
_FEWEST_LAYERS = 12  # of a model that is offered: smaller ones are the lab's own, for CPUs
_MODEL, _GPU = "llama-3.1-8b", "h100-80gb"  # those of `fsdplab plan`


@dataclass(frozen=True)
class Control:
    """A field of a plan, its name on the page, and the values that it offers as texts; numbers get a slider.

    `folded`: it stands among the choices that are shown on request.
    """

    name: str
    label: str
    values: tuple[str, ...]
    default: str
    folded: bool = False

    @property
    def is_slider(self) -> bool:
        """Whether its values are numbers."""
        # one value that is no number, such as "usual", makes it a list to choose from
        return all(value.isdigit() for value in self.values)

    @property
    def shown(self) -> tuple[str, ...]:
        """The values as they are read: `16,384`."""
        if not self.is_slider:
            return self.values
        return tuple(f"{int(value):,}" for value in self.values)


def controls() -> tuple[Control, ...]:
    """Return all controls, in the page's order."""
    gpu_names = tuple(map(short_name, GPUS))
    # every size up to 8, as few sequences of a large model fit; then coarser
    micro_batches = (*map(str, range(1, 9)), "12", "16", "24", "32", "64")
    return (
        # shown at once: what is planned, on which machines, and what decides most of memory and time
        Control("model", "Model", tuple(_models()), _MODEL),
        Control("gpu", "GPU", gpu_names, _GPU),
        _of_a_field("gpus", "GPUs", tuple(map(str, _GPUS))),
        Control("network", "Network", (USUAL, *NETWORKS), USUAL),
        _of_a_field("strategy", "Strategy", STRATEGIES),
        _of_a_field("micro_batch", "Micro-batch", micro_batches),
        _of_a_field("seq", "Sequence (tokens)", _powers(512, 131_072)),
        _of_a_field("checkpointing", "Recomputation", CHECKPOINTINGS),
        _of_a_field("loss", "Loss", LOSSES),
        # on request: the mesh's other axes, the schedule, dtypes, the host and adapters
        _of_a_field("tensor_parallel", "Tensor parallel", _powers(1, 8), folded=True),
        _of_a_field("context_parallel", "Context parallel", _powers(1, 8), folded=True),
        _of_a_field("pipeline_parallel", "Stages of a pipeline", _powers(1, 16), folded=True),
        _of_a_field("expert_parallel", "Expert parallel", _powers(1, 8), folded=True),
        _of_a_field("grad_accum", "Micro-batches of a step", tuple(map(str, _PASSES)), folded=True),
        _of_a_field("prefetch", "Units gathered ahead", tuple(map(str, range(5))), folded=True),
        _of_a_field("optimizer", "Optimizer", tuple(OPTIMIZERS), folded=True),
        Control("offload", "States in host memory", ("none", "cpu"), "none", folded=True),
        Control("host_memory", "Host memory of a node", (USUAL, *_HOSTS), USUAL, folded=True),
        _of_a_field("reduce_dtype", "Gradients travel in", ("fp32", "bf16"), folded=True),
        _of_a_field("master_dtype", "Parameters and state rest in", ("fp32", "bf16"), folded=True),
        _of_a_field("lora_rank", "Rank of adapters (0: all is trained)", ("0", "8", "16", "32", "64"), folded=True),
        Control("base_dtype", "Frozen base under adapters", (USUAL, "bf16", "int8", "nf4"), USUAL, folded=True),
    )


def _models() -> Iterator[str]:
    """Yield the models that are offered: the lab's own, with few layers or few tokens, are for CPUs."""
    for name, shape in SHAPES.items():
        if shape.layers >= _FEWEST_LAYERS and shape.vocabulary > 1000:
            yield name


def _of_a_field(name: str, label: str, values: tuple[str, ...], folded: bool = False) -> Control:
    return Control(name, label, values, str(_DEFAULTS[name]), folded)


_DEFAULTS = {field.name: field.default for field in fields(PlanSpec)}


def _powers(first: int, last: int) -> tuple[str, ...]:
    """Return the powers of two between: `_powers(1, 8) == ("1", "2", "4", "8")`."""
    return tuple(str(first << place) for place in range((last // first).bit_length()))


def short_name(gpu: str) -> str:
    """Return a GPU's name as a flag takes it: `short_name("H100 SXM 80GB") == "h100-80gb"`."""
    return gpu.lower().replace(" sxm", "").replace("rtx ", "").replace(" ", "-")


def settings_of(choice: Mapping[str, str]) -> dict[str, Any]:
    """Return a choice as `plan_spec` takes it; what is not chosen has the control's default."""
    settings: dict[str, Any] = {}
    for control in controls():
        # a choice may have only what differs from the defaults
        value = choice.get(control.name, control.default)
        is_number = value.isdigit() and control.name != "gpu"  # a GPU's name may be a number
        settings[control.name] = int(value) if is_number else value
    for name in ("network", "host_memory", "base_dtype"):
        # `plan_spec` takes None for what the tables have
        if settings[name] == USUAL:
            settings[name] = None
    host_memory = settings["host_memory"]
    if host_memory is not None:
        settings["host_memory"] = parse_size(str(host_memory))
    settings["offload"] = settings["offload"] == "cpu"
    return settings


def spec_of(choice: Mapping[str, str]) -> PlanSpec:
    """Return the plan's spec; raises ModelError, HardwareError or PlanError, each one line."""
    return plan_spec(**settings_of(choice))


def command_of(choice: Mapping[str, str]) -> str:
    """Return the command that prints the same figures; choices at their defaults are left out."""
    defaults = {control.name: control.default for control in controls()}
    words = ["fsdplab plan"]
    for name, value in choice.items():
        is_always_named = name in ("model", "gpu")
        if name in defaults and (is_always_named or value != defaults[name]):
            words.append(f"{flag_of(name)} {value}")
    return " ".join(words)


def offered(choice: Mapping[str, str], changes: Changes) -> dict[str, str] | None:
    """Return a choice with the changes of a remedy, as the controls name them; None where they do not offer one of
    these.

    Of GPUs the next larger number that is offered is taken.
    """
    by_name = {control.name: control for control in controls()}
    changed = dict(choice)
    for name, value in changes.items():
        if name == "shard_size":
            continue  # of a strategy without groups, or the usual one
        if name == "offload":
            words = "cpu"
        elif name == "gpus":
            # a remedy of 20 GPUs: 24 are the next that are offered
            enough = [count for count in by_name[name].values if int(count) >= value]
            # more than the slider has: "" is none of its values, so None is returned below
            words = enough[0] if enough else ""
        else:
            words = str(value)
        if name not in by_name or words not in by_name[name].values:
            return None
        changed[name] = words
    return changed
