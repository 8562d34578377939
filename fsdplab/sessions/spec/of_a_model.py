"""Specs of a model alone: what `run` and `compare` do when they are given a model instead of specs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdplab.common.names import OVER_ALL_RANKS

from .rules import SpecError
from .run_spec import RunSpec

_OF_RANKS = ("card", "profile", "memory", "prefetch", "checkpoint", "offload", "compile", "transport")  # not the twin's


def spec_for(spec: Any, settings: dict[str, Any]) -> RunSpec:
    """The spec itself, or that of a model (a Workload, a file, a preset's name) with these settings."""
    if not isinstance(spec, RunSpec):
        return RunSpec(model=spec, **settings)
    if settings:
        raise SpecError(f"a RunSpec and {', '.join(settings)} were given; put the settings into the spec", *settings)
    return spec


def specs_for(specs: Any, settings: dict[str, Any]) -> list[RunSpec]:
    """The specs themselves, or, for a model, those of five strategies (or of `strategies`) and the unsharded twin."""
    if isinstance(specs, Sequence) and not isinstance(specs, str):
        return [spec_for(spec, settings) for spec in specs]
    if isinstance(specs, RunSpec):
        raise SpecError("a comparison has several runs; give a list of RunSpecs, or a model")
    strategies = settings.pop("strategies", OVER_ALL_RANKS)
    ranks = [RunSpec(model=specs, strategy=strategy, **{"profile": 2, **settings}) for strategy in strategies]
    own = {name: value for name, value in settings.items() if name not in _OF_RANKS}
    return [*ranks, RunSpec(model=specs, engine="twin", **own | {"memory": False})]
