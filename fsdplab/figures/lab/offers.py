"""What the page knows before the first answer: what can be chosen, and the colours."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.figures.style import LANE_COLOURS, STEP_COLOURS
from fsdplab.workloads.own.sources import reads_text

from .choices import CONTROLS, PRESETS, TARGETS, TUNNEL, Choices, Fixed, models_of
from .messages import WAITING, Offers, PresetOffer

_PASSES = {"forward": "compute in forward", "backward": "compute in backward"}  # phase -> its lane of the colours
_SENDS = ("all-gather", "reduce-scatter", "all-reduce")


def offers_of(fixed: Fixed, waiting: str = WAITING, measures: bool = True) -> Offers:
    """All that can be chosen where `fixed` are further fields of each run; `waiting` is shown while an answer is to
    come, and `measures` says whether runs can be measured where the page is.
    """
    own_batches = []
    if not reads_text(fixed.get("model", Choices.model)):
        own_batches = [models_of("laptop", fixed)[0]]
    # the page names messages as torch does, `all-gather`
    kinds: dict[str, str] = {}
    for lane, colour in LANE_COLOURS.items():
        kinds[lane.replace("_", "-")] = colour
    passes = {phase: LANE_COLOURS[lane] for phase, lane in _PASSES.items()}
    legend = {**passes, "optimizer": LANE_COLOURS["optimizer"], "exposed": LANE_COLOURS["exposed"]}
    for kind in _SENDS:
        legend[kind] = kinds[kind]
    categories: dict[str, str] = {}
    for row in CATEGORY_ROWS.values():
        categories[row.name] = row.colour
    return Offers(
        presets={name: _preset_offer(name, fixed) for name in PRESETS},
        values=_values(),
        wind_tunnel=TUNNEL,
        waiting=waiting,
        measures=measures,
        fixed=[*fixed],
        own_batches=own_batches,
        categories=categories,
        step=[
            ("computing", STEP_COLOURS["compute only"]),
            ("hidden", STEP_COLOURS["overlapped"]),
            ("exposed", STEP_COLOURS["exposed"]),
            ("optimizer", LANE_COLOURS["optimizer"]),
        ],
        kinds=[*legend.items()],
        lanes=kinds | passes,
    )


def _preset_offer(name: str, fixed: Fixed) -> PresetOffer:
    preset = PRESETS[name]
    return PresetOffer(
        link_words=preset.link_words,
        links=preset.links,
        tokens=preset.tokens,
        sequences=preset.sequences,
        ranks=preset.ranks,
        choices=asdict(preset.choices),
        models=models_of(name, fixed),
        measured=not preset.gpu,
    )


def _values() -> dict[str, Sequence[Any]]:
    """The values of each control whose values are alike under every preset."""
    values: dict[str, Sequence[Any]] = {}
    for name, control in CONTROLS.items():
        if isinstance(control.values, tuple):
            values[name] = control.values
    # an engine that is not installed could not be measured
    if importlib.util.find_spec("deepspeed") is None:
        values["engines"] = [engine for engine in values["engines"] if not engine.startswith("deepspeed")]
    values["as_model"] = [*TARGETS]
    return values
