"""Defines the commands of `fsdplab plan`: each is one question about a job; without a command it is `plan step`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from fsdplab.cli.options import OUTPUTS, PLAN, Flag, add_command, examples, taken


class _Plan(TyperGroup):
    """A group whose first word may be left out, for `step`; an unknown word is refused as such."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # `fsdplab plan --model ...` is `fsdplab plan step --model ...`
        named = args and (args[0] in ("--help", "-h") or not args[0].startswith("-"))
        return super().parse_args(ctx, args if named else ["step", *args])


app = typer.Typer(
    cls=_Plan,
    help="Predict memory, traffic and step time of a training job, and say what fits: nothing is run. Without a"
    " command it plans one step, with the flags of `plan step`.",
    epilog=examples(
        "fsdplab plan --model llama-3.1-70b --gpu h100-80gb --world-size 16 --checkpoint full",
        "fsdplab plan fit --model llama-3.1-8b --world-size 16",
        "fsdplab plan sweep world-size=8..1024 --model llama-3.1-70b --checkpoint full --figure sweep.html",
    ),
)

TOKENS = Flag(float | None, None, "Tokens of the whole training, such as 15e12: hours and GPU-hours.")
PRICE = Flag(float | None, None, "Dollars of a GPU-hour: costs are told in dollars.")

add_command(
    app,
    "step",
    "plan.step:step_answer",
    "Plan one step: memory by category beside the card, traffic, time, and what would fit. The default command.",
    taken(PLAN),
    {"tokens": TOKENS, "price": PRICE},
    taken(OUTPUTS, "json"),
    shown=(
        "fsdplab plan --model llama-3.1-70b --gpu h100-80gb --world-size 16 --checkpoint full",
        "fsdplab plan --model mistral-7b --gpu 4090 --world-size 4 --lora-rank 16 --base-dtype nf4 --json -",
    ),
)

add_command(
    app,
    "fit",
    "plan.fit:fit_answer",
    "Search the fastest, the cheapest and the safest plan on so many GPUs or fewer, and the best single change.",
    taken(PLAN),
    {
        "tokens": TOKENS,
        "price": PRICE,
        "global_batch": Flag(
            int | None,
            None,
            "Sequences of a step, which all plans keep; default: those of --batch-size and --micro-batches, or 4"
            " million tokens.",
        ),
        "keep": Flag(str, "", "Choices that stay as given: some of world-size,strategy,tp,checkpoint,batch-size."),
    },
    taken(OUTPUTS, "json"),
    shown=(
        "fsdplab plan fit --model llama-3.1-8b --world-size 16",
        "fsdplab plan fit --model llama-3.1-70b --world-size 64 --global-batch 512 --tokens 1e12 --price 2.5",
        "fsdplab plan fit --model llama-3.1-70b --world-size 64 --keep loss,cp --json -",
    ),
)

add_command(
    app,
    "sweep",
    "plan.step:sweep_answer",
    "Plan for each value of one choice.",
    {
        "values": Flag(
            str,
            ...,
            "A flag and its values: world-size=8..1024 (doubling), sequence-length=1024,4096 or network=ib400,eth100.",
            argument=True,
        )
    },
    taken(PLAN),
    taken(OUTPUTS, "json", "figure"),
    shown=(
        "fsdplab plan sweep world-size=8..1024 --model llama-3.1-70b --checkpoint full --figure sweep.html",
        "fsdplab plan sweep model=llama-3.1-8b,llama-2-13b,llama-3.1-70b --world-size 8 --checkpoint full",
    ),
)

add_command(
    app,
    "simulate",
    "plan.simulation:simulation_answer",
    "Simulate the step event by event, beside the closed form, and known steps beside what was measured.",
    taken(PLAN),
    {
        "record": Flag(
            Path | None,
            None,
            "A profiled run of yours, on CPU ranks with a link, to simulate again beside its own steps.",
        )
    },
    taken(OUTPUTS, "json", "html"),
    shown=(
        "fsdplab plan simulate --model llama-3.1-405b --world-size 10000 --html step.html",
        "fsdplab plan simulate --record runs/full_shard",
    ),
)
