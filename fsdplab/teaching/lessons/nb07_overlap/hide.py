"""Notebook 07, its last exercise: settings with which a steady card hides its traffic; compute and link are emulated,
so right is right anywhere.
"""

from __future__ import annotations

import ast
from typing import Any

from fsdplab.teaching.core.exercise import Case, Exercise, Trial, Wrong, edited
from fsdplab.teaching.core.findings import Difference

from . import on_ranks

_RANKS = 2

_HIDE = '''\
def hide():
    """Settings with which little of the communication shows."""
    return {{
        "units": "{units}",  # "linear", "block", "model": what travels together
        "prefetch": {prefetch},  # 0, 1, 2: units to gather ahead
        "link_queues": {queues},  # 1: gathers and reductions in one queue; 2: a communicator for each
        "batch_size": {batch},  # 1, 2 sequences
    }}
'''


def _hide(units: str = "block", prefetch: int = 1, queues: int = 2, batch: int = 2) -> str:
    return _HIDE.format(units=units, prefetch=prefetch, queues=queues, batch=batch)


def _hide_cases() -> list[Case]:
    expected = {"settings": "", "milliseconds over the target": 0}
    return [Case("two steps on the steady card", ((),) * _RANKS, (expected,) * _RANKS)]


def _explain_hide(case: Case, trial: Trial, difference: Difference) -> tuple[str | None, str]:
    if "settings" in difference.tensor or not trial.returned or trial.returned["milliseconds over the target"] is None:
        return None, trial.returned["settings"]
    chosen, split = trial.printed.strip().splitlines()[-2:]
    return split, f"{trial.returned['milliseconds over the target']} ms too many. {_remedy(ast.literal_eval(chosen))}"


def _remedy(settings: dict[str, Any]) -> str:
    """What to change first: the setting whose mistake covers up all others."""
    if settings["units"] == "model":
        return (
            "One unit: its gather has no compute before it and its reduction none after it, so nothing can be hidden,"
            " however early it is sent"
        )
    if settings["prefetch"] == 0:
        return "Each gather is issued when its unit is needed, and the rank waits for all of it: gather ahead"
    if settings["units"] == "linear":
        return (
            f"Small units: {on_ranks.PARTS} messages a block in place of one, and each pays the latency of"
            f" {on_ranks.LATENCY_MS:g} ms. Let more travel together"
        )
    if settings["batch_size"] == 1:
        return "A block's messages take longer than its compute, so no order hides them: give each step more to compute"
    return (
        "In backward a gather and a reduction belong to each block: one after the other they take longer than its"
        " compute, side by side they do not"
    )


hide = Exercise(
    id="07.hide",
    title="Hide the traffic",
    statement=(
        f"Write hide(): settings with which at most {on_ranks.TARGET_MS} ms a step are exposed on the steady card."
    ),
    stub=_hide("linear", 0, 1, 1),
    reference=_hide(),
    hints=(
        (
            "Change one setting at a time, and read which of the three (gathers in forward, gathers in backward,"
            " reductions) shows most."
        ),
        (
            "Per block and two sequences: forward 80 ms, backward 120; a gather 60, a reduction 100. What must fit"
            " under what?"
        ),
        (
            "Blocks as units, prefetch 1, two sequences; and 60 + 100 do not fit under 120 one after the other, but"
            " side by side they do."
        ),
    ),
    cases=_hide_cases,
    explain=_explain_hide,
    hung="the ranks wait for each other: return the same settings on every rank",
    world_size=_RANKS,
    time_limit=90.0,
    driver=(str(on_ranks.__file__), "drive_hide"),
    wrong=(
        Wrong("no prefetch", _hide(prefetch=0), "gather ahead"),
        Wrong("one queue", _hide(queues=1), "side by side they do"),
        Wrong("one queue, deeper prefetch", _hide(queues=1, prefetch=2), "side by side they do"),
        Wrong("one sequence", _hide(batch=1), "more to compute"),
        Wrong("linear layers", _hide(units="linear"), "pays the latency"),
        Wrong("one unit", _hide(units="model"), "nothing can be hidden"),
        Wrong("four sequences", _hide(batch=4), "does not fit"),
        Wrong("a setting that is none", edited(_hide(), ('"prefetch"', '"ahead"')), "unknown setting 'ahead'"),
        Wrong(
            "a setting left out",
            edited(
                _hide(),
                (
                    '        "link_queues": 2,  # 1: gathers and reductions in one queue; 2: a communicator for each\n',
                    "",
                ),
            ),
            "link_queues missing",
        ),
        Wrong("a word that is none", _hide(units="layer"), "expected one of 'linear', 'block', 'model'"),
        Wrong("a text", edited(_hide(), ("return {", "return str({"), ("    }\n", "    })\n")), "expected a dict"),
    ),
)
