"""The commands of `fsdplab plan`: each is one question about a job; without a command it is `plan step`.

Their names were flags once (`plan --fit`); these still work, with a note.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fsdplab.cli.errors import refuse
from fsdplab.cli.options import PLAN, SETTINGS, examples, outputs_of, settings_of
from fsdplab.cli.outputs import Outputs

_WERE_FLAGS = {"--fit": "fit", "--sweep": "sweep", "--simulate": "simulate", "--ask": "ask", "--validate": "validate"}
_WITHOUT_VALUE = ("--fit", "--simulate")


class _Plan(TyperGroup):
    """A group whose first word may be left out, for `step`, or be one of the flags of before."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _with_command(args, tuple(self.commands)))


def _with_command(args: list[str], commands: tuple[str, ...]) -> list[str]:
    """`["--world-size", "8", "--fit"]` -> `["fit", "--world-size", "8"]`; what a value follows keeps it."""
    if args and args[0] in (*commands, "--help", "-h"):
        return args
    given = [word for word in args if word.partition("=")[0] in _WERE_FLAGS]
    if not given:
        named = args and not args[0].startswith("-")  # an unknown name is refused as such
        return args if named else ["step", *args]
    if len(given) > 1:
        refuse(f"{' and '.join(given)} were given; expected one of them, or none for the plan of a step")
    flag, equals, value = given[0].partition("=")
    command, place = _WERE_FLAGS[flag], args.index(given[0])
    before, after = args[:place], args[place + 1 :]
    if equals and flag in _WITHOUT_VALUE:
        refuse(f"{flag} is {value!r}; expected no value: fsdplab plan {command}")
    if flag == "--sweep" and not equals:
        value, after = "".join(after[:1]), after[1:]
    print(f"fsdplab: plan {flag} is now plan {command}; the flag works until the next version", file=sys.stderr)
    return [command, *([value] if equals or flag == "--sweep" else []), *before, *after]


app = typer.Typer(
    cls=_Plan,
    help="Predict memory, traffic and step time of a training job, and say what fits: nothing is run. Without a"
    " command it plans one step, with the flags of `plan step`.",
    epilog=examples(
        "fsdplab plan --model llama-3.1-70b --gpu h100-80gb --world-size 16 --checkpoint full",
        "fsdplab plan fit --model llama-3.1-8b --world-size 16",
        "fsdplab plan sweep world-size=8..1024 --model llama-3.1-70b --checkpoint full --figure sweep.html",
        "fsdplab plan ask hybrid --model llama-3.1-70b --world-size 16 --figure hybrid.html",
    ),
)

Tokens = Annotated[float | None, typer.Option(help="Tokens of the whole training, such as 15e12: hours and GPU-hours.")]


@app.command(
    epilog=examples(
        "fsdplab plan --model llama-3.1-70b --gpu h100-80gb --world-size 16 --checkpoint full",
        "fsdplab plan --model mistral-7b --gpu 4090 --world-size 4 --lora-rank 16 --base-dtype nf4 --json -",
    )
)
@outputs_of("json")
@settings_of(*PLAN, of=PLAN)
def step(settings: dict[str, Any] = SETTINGS, tokens: Tokens = None, outputs: Outputs = Outputs()) -> None:
    """Plan one step: memory by category beside the card, traffic, time, and what would fit. The default command."""
    from fsdplab.cli.plan.step import step_answer

    outputs.give(step_answer(settings, tokens))


@app.command(
    epilog=examples(
        "fsdplab plan fit --model llama-3.1-8b --world-size 16",
        "fsdplab plan fit --model llama-3.1-70b --world-size 64 --global-batch 512 --tokens 1e12 --price 2.5",
        "fsdplab plan fit --model llama-3.1-70b --world-size 64 --keep loss,cp --json -",
    )
)
@outputs_of("json")
@settings_of(*PLAN, of=PLAN)
def fit(
    settings: dict[str, Any] = SETTINGS,
    tokens: Tokens = None,
    price: Annotated[float | None, typer.Option(help="Dollars of a GPU-hour: costs are told in dollars.")] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            help="Sequences of a step, which all plans keep; default: those of --batch-size and --micro-batches, or 4"
            " million tokens."
        ),
    ] = None,
    keep: Annotated[
        str,
        typer.Option(
            help="Choices that stay as given: some of world-size,strategy,tp,cp,pp,ep,checkpoint,loss,batch-size."
        ),
    ] = "",
    outputs: Outputs = Outputs(),
) -> None:
    """Search the fastest, the cheapest and the safest plan on so many GPUs or fewer, and the best single change."""
    from fsdplab.cli.plan.fit import fit_answer

    outputs.give(fit_answer(settings, tokens, price, global_batch, keep))


@app.command(
    epilog=examples("fsdplab plan sweep world-size=8..1024 --model llama-3.1-70b --checkpoint full --figure sweep.html")
)
@outputs_of("json", "figure")
@settings_of(*PLAN, of=PLAN)
def sweep(
    values: Annotated[
        str, typer.Argument(help="A flag and its values: world-size=8..1024 (doubling), or sequence-length=1024,4096.")
    ],
    settings: dict[str, Any] = SETTINGS,
    outputs: Outputs = Outputs(),
) -> None:
    """Plan for each value of one choice."""
    from fsdplab.cli.plan.step import sweep_answer

    outputs.give(sweep_answer(settings, values))


@app.command(
    epilog=examples(
        "fsdplab plan simulate --model llama-3.1-405b --world-size 10000 --html step.html",
        "fsdplab plan simulate --record runs/full_shard",
    )
)
@outputs_of("json", "html")
@settings_of(*PLAN, of=PLAN)
def simulate(
    settings: dict[str, Any] = SETTINGS,
    record: Annotated[
        Path | None,
        typer.Option(help="A profiled run of yours, on CPU ranks with a link, to simulate again beside its own steps."),
    ] = None,
    outputs: Outputs = Outputs(),
) -> None:
    """Simulate the step event by event, beside the closed form, and known steps beside what was measured."""
    from fsdplab.cli.plan.simulation import simulation_answer

    outputs.give(simulation_answer(settings, record))


@app.command(epilog=examples("fsdplab plan ask", "fsdplab plan ask hybrid --model llama-3.1-70b --world-size 16"))
@outputs_of("json", "figure")
@settings_of(*PLAN, of=PLAN)
def ask(
    question: Annotated[str | None, typer.Argument(help="A question's name; without one they are listed.")] = None,
    settings: dict[str, Any] = SETTINGS,
    outputs: Outputs = Outputs(),
) -> None:
    """Answer a question about a plan, such as hybrid, or list them: 14 of tuning, and five more."""
    from fsdplab.cli.plan.questions import question_answer, questions_answer

    outputs.give(questions_answer() if question is None else question_answer(question, settings))


@app.command(epilog=examples("fsdplab plan validate", "fsdplab plan validate measured.csv --figure validation.html"))
@outputs_of("json", "figure")
def validate(
    file: Annotated[Path | None, typer.Argument(help="A CSV with the columns of data/published.csv.")] = None,
    outputs: Outputs = Outputs(),
) -> None:
    """Predict published measurements, and say how far off the predictions are."""
    from fsdplab.cli.plan.validation import validation_answer

    outputs.give(validation_answer(file))
