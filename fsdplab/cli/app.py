"""The command line: `fsdplab <command>`, one short function a command.

An invalid request prints one line on stderr and exits with 2; a failed run prints its report and exits with 1. Commands
import what they need when they run, so that `fsdplab --help` is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fsdplab import __version__
from fsdplab.cli.errors import USAGE_ERROR, failed, interrupted, one_line, refuse, refuse_for
from fsdplab.cli.old_names import as_today
from fsdplab.cli.options import (
    OF_A_RUN,
    SETTINGS,
    card_of,
    check_strategies,
    examples,
    in_flags,
    link_of,
    names,
    one_strategy,
    outputs_of,
    settings_of,
    whole_numbers,
)
from fsdplab.cli.outputs import Outputs
from fsdplab.cli.plan.commands import app as plan
from fsdplab.cli.terminal import show_what_can_be_shown, signals_as_exceptions
from fsdplab.common.errors import RunError, UserError
from fsdplab.common.names import OVER_ALL_RANKS, STRATEGIES, STRATEGIES_IN_WORDS
from fsdplab.sessions.spec import PEERS, SpecError


class _App(TyperGroup):
    """The group of all commands, which takes flags by their names of before too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, as_today(args))


app = typer.Typer(
    cls=_App,
    help="A laboratory for Fully Sharded Data Parallel training.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

Card = Annotated[
    str,
    typer.Option(
        help="Memory of an emulated card: 300MB, 1.5GB, none, or auto (the wind tunnel's; else 330MB to compare, none"
        " to run)."
    ),
]


def begin_warm(start: str, strategies: Sequence[str] = ()) -> None:
    """Start the warm starter before heavy imports, so that both processes import torch at the same time; a strategy
    that does not exist is refused before, as these take seconds.
    """
    check_strategies(strategies)
    if start in ("auto", "warm"):
        from fsdplab.sessions.launch import warm

        warm.begin()


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        print(f"fsdplab {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command(
    epilog=examples(
        "fsdplab compare",
        "fsdplab compare --strategies zero2,full_shard --engines lab,torch-fsdp2 --link eth10",
        "fsdplab compare --world-size 4 --strategies full_shard,hybrid_shard --shard-size 2 --html page.html",
    )
)
@outputs_of("json", "html", "keep", "force", "quiet", "verbose")
@settings_of(*OF_A_RUN, profile=2, sequence_length=128, link="auto")
def compare(
    strategies: Annotated[
        str,
        typer.Option(
            help=f"Strategies, comma-separated: {STRATEGIES_IN_WORDS}. Settings of one run may follow it:"
            " full_shard:prefetch=0.",
            show_default="all but hybrid_shard, and full_shard:prefetch=0",
        ),
    ] = ",".join([*OVER_ALL_RANKS, "full_shard:prefetch=0"]),
    engines: Annotated[
        str,
        typer.Option(
            help=f"Engines, comma-separated: lab, {', '.join(PEERS)}. Each runs those of the strategies that it does;"
            " a note says what is left out."
        ),
    ] = "lab",
    settings: dict[str, Any] = SETTINGS,
    card: Card = "auto",
    outputs: Outputs = Outputs(),
) -> None:
    """Train one model on one text under several strategies, and compare time, memory, traffic and losses."""
    begin_warm(settings["start"], names(strategies))
    from fsdplab.cli.compare import compare_runs

    settings["card"] = card_of(card, settings, "330MB")
    settings["link"] = link_of(settings, names(engines), "150MB/s")
    compare_runs(names(strategies), names(engines), settings, outputs)


@app.command(
    epilog=examples(
        "fsdplab run full_shard",
        "fsdplab run hybrid_shard -n 4 --shard-size 2 --link nvlink4 --link-across eth10",
        "fsdplab run zero2 --nodes 2 --ranks-per-node 2 --link 200mbit --out runs/two-nodes",
    )
)
@outputs_of("json", "force", "quiet", "verbose")
@settings_of("strategy", "engine", *OF_A_RUN, "checkpoint", "offload", "transport", profile=2)
def run(
    named: Annotated[
        str | None,
        typer.Argument(
            metavar="STRATEGY", help="The strategy; the same as --strategy.", autocompletion=lambda: list(STRATEGIES)
        ),
    ] = None,
    settings: dict[str, Any] = SETTINGS,
    nodes: Annotated[
        int,
        typer.Option(help="Nodes: more than one are network namespaces with a real, rate-limited link between them."),
    ] = 1,
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks of each node; default: world size / nodes.")] = None,
    card: Card = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder of the record; default: a new one, runs/<strategy>-<engine>.")
    ] = None,
    outputs: Outputs = Outputs(),
) -> None:
    """Run one strategy and record it in a folder, for `fsdplab report` and the notebooks."""
    strategy = settings["strategy"] = one_strategy(named, settings["strategy"])
    begin_warm(settings["start"], [strategy])
    from fsdplab.cli.compare import record_on_nodes, record_run

    settings["card"] = card_of(card, settings, "none")
    outputs = replace(outputs, keep=out)
    if nodes != 1 or ranks_per_node is not None:
        record_on_nodes(settings, nodes, ranks_per_node, outputs)
    else:
        record_run(settings, outputs)


@app.command(
    epilog=examples(
        "fsdplab record --out mine -- torchrun --nproc-per-node 2 train.py --lr 1e-4",
        "fsdplab record --out mine --steps 100:102 -- accelerate launch train.py",
        "fsdplab report mine --html page.html",
    ),
    context_settings={"allow_interspersed_args": False},
)
@outputs_of("json", "html", "force", "quiet", "verbose")
def record(
    command: Annotated[
        list[str] | None, typer.Argument(help="The command that starts the job, behind --.", metavar="COMMAND")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the record.")] = Path("runs/recorded"),
    steps: Annotated[
        str,
        typer.Option(
            help="Optimizer steps to profile, FIRST:END counted from 0; memory is measured in the one before."
        ),
    ] = "10:13",
    ranks: Annotated[
        str | None,
        typer.Option(
            help="Ranks to measure, such as 0,1,8; default: all of at most 16, else those of the first node. The steps"
            " of every rank are timed."
        ),
    ] = None,
    print_env: Annotated[
        bool,
        typer.Option(
            "--print-env", help="Run nothing: print the environment in which ranks record themselves, for other nodes."
        ),
    ] = False,
    outputs: Outputs = Outputs(),
) -> None:
    """Run a training job of your own as it would run, and record a few of its steps: times, memory, a trace."""
    from fsdplab.cli.record import print_environment, record_job

    if print_env:
        print_environment(command or [], out, steps, ranks)
    elif not command:
        refuse("record got no command; give the one that starts the job behind --")
    else:
        raise typer.Exit(record_job(command, out, steps, ranks, outputs))


@app.command(
    epilog=examples(
        "fsdplab report runs/full_shard-lab --html page.html",
        "fsdplab report rank0.json rank1.json",
        "fsdplab report folder/of/traces --comm-pattern my_dispatch=all_to_all",
        "fsdplab report runs/full_shard-lab --perfetto trace.json.gz",
    )
)
@outputs_of("html", "json", "quiet", "verbose", "tensorboard", "perfetto", "csv", "snapshot")
def report(
    records: Annotated[
        list[Path],
        typer.Argument(
            help="Folders that `fsdplab run` or `compare --keep` wrote, or traces of PyTorch's profiler, one a rank, or"
            " a folder of them."
        ),
    ],
    outputs: Outputs = Outputs(),
    tables: Annotated[
        bool,
        typer.Option(
            "--tables",
            help="Print what the traces tell: critical path, idle time, bandwidth by size, operators, launches.",
        ),
    ] = False,
    ranks: Annotated[
        str | None, typer.Option(help="The ranks of the traces, in the files' order, where they do not tell: 0,1,2.")
    ] = None,
    comm_pattern: Annotated[
        list[str] | None,
        typer.Option(
            help="A kernel that communicates beside NCCL's: a part of its name, =collective behind it where the name"
            " does not say which (my_dispatch=all_to_all). May be given several times."
        ),
    ] = None,
) -> None:
    """Show recorded runs, or traces, as a table with findings, a standalone page or JSON; a record of the twin serves
    as the reference.
    """
    from fsdplab.cli.report import report_records
    from fsdplab.profiling.traces.import_traces import TraceOptions

    options = TraceOptions(whole_numbers("--ranks", ranks) if ranks else None, comm_pattern or [])
    report_records(records, outputs, options, tables)


@app.command(
    epilog=examples("fsdplab bench", "fsdplab bench --link 400MB/s --prefetch 0,1", "fsdplab bench --compile blocks")
)
@outputs_of("json")
@settings_of(
    "world_size", "model", "batch_size", "sequence_length", "precision", "optimizer", "compile", "transport", "link",
    "device", "start", "time_limit", model="gpt-25m", batch_size=4, sequence_length=256, time_limit=900.0,
)  # fmt: skip
def bench(
    strategies: Annotated[
        str, typer.Option(help=f"Strategies of the lab's own engine, comma-separated: {STRATEGIES_IN_WORDS}.")
    ] = ",".join(reversed(OVER_ALL_RANKS)),
    engines: Annotated[str, typer.Option(help="Other engines in the same run.")] = "torch-ddp,torch-fsdp2",
    settings: dict[str, Any] = SETTINGS,
    rounds: Annotated[int, typer.Option(help="Timed rounds: in each, every engine does one step.")] = 10,
    peer_transport: Annotated[
        str, typer.Option(help="Of the other engines: auto (gloo or nccl), or shm for torch's own.")
    ] = "auto",
    prefetch: Annotated[str, typer.Option(help="Units gathered ahead; several numbers give a row each: 0,1.")] = "1",
    outputs: Outputs = Outputs(),
) -> None:
    """Time engines in turn in one run, and report ratios of medians."""
    begin_warm(settings["start"], names(strategies))
    from fsdplab.cli.bench import bench_engines

    settings |= {"memory": False}
    bench_engines(names(strategies), names(engines), settings, rounds, outputs, peer_transport, prefetch)


app.add_typer(plan, name="plan")


@app.command(epilog=examples("fsdplab doctor", "fsdplab doctor --json -"))
@outputs_of("json")
def doctor(
    outputs: Outputs = Outputs(),
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine, so that compare predicts step times; 10 s.")
    ] = False,
    world_size: Annotated[int, typer.Option("--world-size", "-n", help="Of --calibrate: ranks that work at once.")] = 2,
    room: Annotated[
        bool,
        typer.Option("--room", help="One line for a class: train on two ranks, and say whether the course runs here."),
    ] = False,
) -> None:
    """Show what this machine can do, and what is real, emulated or simulated on it."""
    if calibrate:
        begin_warm("auto")
        from fsdplab.cli.calibrate import calibrate_here

        calibrate_here(world_size, outputs)
    elif room:
        from fsdplab.cli.doctor import room_answer

        ready, answer = room_answer()
        outputs.give(answer)
        raise typer.Exit(0 if ready else 1)
    else:
        from fsdplab.cli.doctor import capabilities_answer

        outputs.give(capabilities_answer())


@app.command(epilog=examples("fsdplab calibrate mine.json", "fsdplab plan --gpu mine.json"))
@outputs_of("json")
def calibrate(
    file: Annotated[Path, typer.Argument(help="The JSON file to write.")],
    seconds: Annotated[float, typer.Option(help="How long to measure, in all.")] = 10.0,
    outputs: Outputs = Outputs(),
) -> None:
    """Measure this machine's GPU, or its CPU, and write it as a file for plan --gpu."""
    from fsdplab.cli.calibrate import write_own_card

    write_own_card(file, seconds, outputs)


@app.command(epilog=examples("fsdplab lab", "fsdplab lab --edition teacher --no-browser --port 8899"))
def lab(
    notebooks: Annotated[
        Path | None, typer.Option(help="Open this folder of notebooks as it is, instead of an edition.")
    ] = None,
    edition: Annotated[
        str, typer.Option(help="learner: exercises to solve, in course-learner/; teacher: the sources.")
    ] = "learner",
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open a browser, or only print the address.")
    ] = True,
    port: Annotated[
        int | None,
        typer.Option(help="Port of the server; 0: any that is free; default: JupyterLab's choice.", min=0, max=65535),
    ] = None,
) -> None:
    """Open JupyterLab on the course's notebooks."""
    from fsdplab.cli.lab import open_lab

    raise typer.Exit(open_lab(notebooks, browser, port, edition))


# what a module's own parser reads, its --help too
_AS_GIVEN = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=_AS_GIVEN)
def course(context: typer.Context) -> None:
    """Build and test the course's editions, for teachers and for CI; write it as pages: build, test or site."""
    from fsdplab.cli.lab import run_course

    raise typer.Exit(run_course(context.args))


@app.command("gpu-check", context_settings=_AS_GIVEN)
def gpu_check(context: typer.Context) -> None:
    """Check a GPU machine from the driver to the speed of training, and keep the result; or a dry run on the CPU."""
    from fsdplab.cli.lab import run_module

    raise typer.Exit(run_module("fsdplab.gpu_check", context.args))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 a run failed, 2 invalid request, 130 for Ctrl-C (128 + the signal)."""
    show_what_can_be_shown()
    with signals_as_exceptions(until_the_end=arguments is None) as signals:
        try:
            status = app(args=arguments, prog_name="fsdplab", standalone_mode=False)
            sys.stdout.flush()
        except USAGE_ERROR as error:
            refuse(one_line(error))
        except SpecError as error:
            refuse(in_flags(error))
        except UserError as error:
            refuse(str(error))
        except RunError as error:
            failed(str(error))
        except (KeyboardInterrupt, typer.Abort):
            interrupted(signals.number)
        except OSError as error:
            refuse_for(error)
        if signals.number is not None:  # typer makes a number of the exception
            interrupted(signals.number)
    sys.exit(status or 0)
