"""Defines the command line: `fsdplab <command>`, a row for each command; `does` names the function that answers.

An invalid request prints one line on stderr and exits with 2; a failed run prints its report and exits with 1. The
function is imported when its command runs, so that `fsdplab --help` is quick.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fsdplab import __version__
from fsdplab.cli.errors import USAGE_ERROR, failed, interrupted, one_line, refuse
from fsdplab.cli.options import (
    OF_A_RUN,
    OUTPUTS,
    RUN,
    Flag,
    add_command,
    in_flags,
    known_strategy,
    names,
    strategies,
    taken,
    whole_numbers,
)
from fsdplab.cli.plan.commands import app as plan
from fsdplab.cli.terminal import signals_as_exceptions
from fsdplab.common.errors import RunError, UserError
from fsdplab.common.names import OVER_ALL_RANKS, STRATEGIES, STRATEGIES_IN_WORDS
from fsdplab.common.streams import line_for, show_what_can_be_shown
from fsdplab.sessions.spec import PEERS, SpecError

app = typer.Typer(
    help="A laboratory for Fully Sharded Data Parallel training.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        print(f"fsdplab {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


CARD = Flag(
    str,
    "auto",
    "Memory of an emulated card: 300MB, none, or auto (the wind tunnel's; 330MB to compare the default model;"
    " else none).",
)

add_command(
    app,
    "compare",
    "compare:compare_runs",
    "Train one model on one text under several strategies, and compare time, memory, traffic and losses.",
    {
        "strategies": Flag(
            str,
            ",".join([*OVER_ALL_RANKS, "full_shard:prefetch=0"]),
            f"Strategies, comma-separated: {STRATEGIES_IN_WORDS}. Settings of one run may follow it:"
            " full_shard:prefetch=0.",
            read=strategies,
            more={"show_default": "all but hybrid_shard, and full_shard:prefetch=0"},
        ),
        "engines": Flag(
            str,
            "lab",
            f"Engines, comma-separated: lab, {', '.join(PEERS)}. Each runs those of the strategies that it does; a note"
            " says what is left out.",
            read=names,
        ),
    },
    taken(RUN, *OF_A_RUN, profile=2, sequence_length=128, link="auto"),
    {"card": CARD},
    taken(OUTPUTS, "json", "html", "keep", "force", "quiet", "verbose"),
    shown=(
        "fsdplab compare",
        "fsdplab compare --strategies zero2,full_shard --engines lab,torch-fsdp2 --link eth10",
        "fsdplab compare --world-size 4 --strategies full_shard,hybrid_shard --shard-size 2 --html page.html",
    ),
)

add_command(
    app,
    "run",
    "compare:record_run",
    "Run one strategy and record it in a folder, for `fsdplab report` and the notebooks.",
    {
        "named": Flag(
            str | None,
            None,
            "The strategy; the same as --strategy.",
            one_of=tuple(STRATEGIES),
            argument=True,
            read=lambda given: given and known_strategy(given),
            more={"metavar": "STRATEGY"},
        )
    },
    {"strategy": replace(RUN["strategy"], read=known_strategy, into="settings")},
    taken(RUN, "engine", *OF_A_RUN, "checkpoint", "offload", "transport", profile=2),
    {
        "card": CARD,
        "out": Flag(Path | None, None, "Folder of the record; default: a new one, runs/<strategy>-<engine>."),
    },
    taken(OUTPUTS, "json", "force", "quiet", "verbose"),
    shown=(
        "fsdplab run full_shard",
        "fsdplab run hybrid_shard -n 4 --shard-size 2 --link nvlink4 --link-across eth10",
        "fsdplab run zero2 --link 200mbit --out runs/slow-link",
    ),
)

add_command(
    app,
    "record",
    "record:record_job",
    "Run a training job of your own as it would run, and record a few of its steps: times, memory, a trace.",
    {
        "command": Flag(
            list[str] | None,
            None,
            "The command that starts the job, behind --.",
            argument=True,
            more={"metavar": "COMMAND"},
        ),
        "out": Flag(Path, Path("runs/recorded"), "Folder of the record."),
        "steps": Flag(
            str,
            "8:16",
            "Optimizer steps to profile, FIRST:END counted from 0; memory is that of two steps before (a GPU: three).",
        ),
        "ranks": Flag(
            str | None,
            None,
            "Ranks to measure, such as 0,1,8; default: all of at most 16, else those of the first node. The steps of"
            " every rank are timed.",
        ),
        "print_env": Flag(
            bool,
            False,
            "Run nothing: print the environment in which ranks record themselves, for other nodes.",
            ("--print-env",),
        ),
    },
    taken(OUTPUTS, "json", "html", "force", "quiet", "verbose"),
    shown=(
        "fsdplab record --out mine -- torchrun --nproc-per-node 2 train.py --lr 1e-4",
        "fsdplab record --out mine --steps 100:102 -- accelerate launch train.py",
        "fsdplab report mine --html page.html",
    ),
    allow_interspersed_args=False,
)

add_command(
    app,
    "report",
    "report:report_records",
    "Show recorded runs, or traces, as a table with findings, a standalone page or JSON; a record of the twin serves as"
    " the reference.",
    {
        "records": Flag(
            list[Path],
            ...,
            "Folders that `fsdplab run` or `compare --keep` wrote, or traces of PyTorch's profiler, one a rank, or a"
            " folder of them, or snapshots of torch.cuda.memory._dump_snapshot().",
            argument=True,
        )
    },
    taken(OUTPUTS, "html", "json", "quiet", "verbose", "tensorboard", "perfetto", "csv", "snapshot"),
    {
        "tables": Flag(
            bool,
            False,
            "Print what the traces tell: critical path, idle time, bandwidth by size, operators, launches.",
            ("--tables",),
        ),
        "ranks": Flag(
            str | None,
            None,
            "The ranks of the traces, in the files' order, where they do not tell: 0,1,2.",
            read=lambda given: whole_numbers("--ranks", given) if given else None,
        ),
        "comm_pattern": Flag(
            list[str] | None,
            None,
            "A kernel that communicates beside NCCL's: a part of its name, =collective behind it where the name does"
            " not say which (my_dispatch=all_to_all). May be given several times.",
        ),
    },
    shown=(
        "fsdplab report runs/full_shard-lab --html page.html",
        "fsdplab report rank0.json rank1.json",
        "fsdplab report snapshot.pickle --html page.html",
        "fsdplab report folder/of/traces --comm-pattern my_dispatch=all_to_all",
        "fsdplab report runs/full_shard-lab --perfetto trace.json.gz",
    ),
)

add_command(
    app,
    "bench",
    "bench:bench_engines",
    "Time engines in turn in one run, and report ratios of medians.",
    {
        "strategies": Flag(
            str,
            ",".join(reversed(OVER_ALL_RANKS)),
            f"Strategies of the lab's own engine, comma-separated: {STRATEGIES_IN_WORDS}.",
            read=strategies,
        ),
        "engines": Flag(str, "torch-ddp,torch-fsdp2", "Other engines in the same run.", read=names),
    },
    taken(
        RUN,
        "world_size",
        "model",
        "batch_size",
        "sequence_length",
        "precision",
        "optimizer",
        "compile",
        "transport",
        "link",
        "device",
        "start",
        "time_limit",
        model="gpt-25m",
        batch_size=4,
        sequence_length=256,
        time_limit=900.0,
    ),
    {
        "rounds": Flag(int, 10, "Timed rounds: in each, every engine does one step."),
        "peer_transport": Flag(str, "auto", "Of the other engines: auto (gloo or nccl), or shm for torch's own."),
        "prefetch": Flag(
            str,
            "1",
            "Units gathered ahead; several numbers give a row each: 0,1.",
            read=lambda given: whole_numbers("--prefetch", given),
        ),
    },
    taken(OUTPUTS, "json"),
    shown=("fsdplab bench", "fsdplab bench --link 400MB/s --prefetch 0,1", "fsdplab bench --compile blocks"),
)

app.add_typer(plan, name="plan")

add_command(
    app,
    "doctor",
    "doctor:doctor",
    "Show what this machine can do, and what is real, emulated or simulated on it.",
    taken(OUTPUTS, "json"),
    {
        "calibrate": Flag(
            bool, False, "Measure this machine, so that compare predicts step times; 10 s.", ("--calibrate",)
        ),
        "world_size": Flag(int, 2, "Of --calibrate: ranks that work at once.", ("--world-size", "-n")),
        "room": Flag(
            bool,
            False,
            "One line for a class: train on two ranks; say whether the course runs here, and on how many ranks.",
            ("--room",),
        ),
    },
    shown=("fsdplab doctor", "fsdplab doctor --json -"),
)

add_command(
    app,
    "calibrate",
    "doctor:write_own_card",
    "Measure this machine's GPU, or its CPU, and write it as a file for plan --gpu.",
    {
        "file": Flag(Path, ..., "The JSON file to write.", argument=True),
        "seconds": Flag(float, 10.0, "How long to measure, in all."),
    },
    taken(OUTPUTS, "json"),
    shown=("fsdplab calibrate mine.json", "fsdplab plan --gpu mine.json"),
)

add_command(
    app,
    "lab",
    "lab:open_lab",
    "Open JupyterLab on the course's notebooks.",
    {
        "notebooks": Flag(Path | None, None, "Open this folder of notebooks as it is, instead of an edition."),
        "edition": Flag(str, "learner", "learner: exercises to solve, in course-learner/; teacher: the sources."),
        "browser": Flag(bool, True, "Open a browser, or only print the address.", ("--browser/--no-browser",)),
        "port": Flag(
            int | None,
            None,
            "Port of the server; 0: any that is free; default: JupyterLab's choice.",
            more={"min": 0, "max": 65535},
        ),
    },
    shown=("fsdplab lab", "fsdplab lab --edition teacher --no-browser --port 8899"),
)

add_command(
    app,
    "gpu-check",
    "gpu_check:gpu_check",
    "Check a GPU machine: doctor, the tests for GPUs, compare and bench, whose results are kept in a folder.",
    {
        "device": Flag(str, "cuda", "cuda, or cpu: a rehearsal in tiny sizes.", one_of=("cuda", "cpu")),
        "out": Flag(Path | None, None, "Folder for the results, new or empty; default: gpu-check-DEVICE."),
    },
    taken(OUTPUTS, "json"),
    shown=("fsdplab gpu-check", "fsdplab gpu-check --device cpu --out rehearsal"),
)

# what a module's own parser reads, its --help too
_AS_GIVEN = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=_AS_GIVEN)
def course(context: typer.Context) -> None:
    """Build and run the course's editions, write pages, slides and handouts, and show a class's progress."""
    from fsdplab.cli.lab import run_course

    raise typer.Exit(run_course(context.args))


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
            refuse(line_for(error))
        if signals.number is not None:  # typer makes a number of the exception
            interrupted(signals.number)
    sys.exit(status or 0)
