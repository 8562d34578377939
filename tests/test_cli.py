"""The command line as a user sees it: one line for an invalid request, one report for what fails, and a whole
comparison.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import fsdplab
from fsdplab import cli
from fsdplab.cli.doctor import verdict_lines
from fsdplab.cli.options import card_of, names
from fsdplab.cli.outputs import Outputs
from fsdplab.cli.progress import ProgressTable
from fsdplab.cli.render import show
from fsdplab.cli.runs import parts_of_runs
from fsdplab.common.places import how_to_install
from fsdplab.figures.view import RunView
from fsdplab.records import CATEGORIES, RunRecord, Spread, Summary
from fsdplab.records.summary import Comm, Peak, Steady
from fsdplab.sessions import RunSpec
from fsdplab.sessions.capabilities import readiness
from fsdplab.sessions.spec import STRATEGIES

TINY = ["--model", "gpt-tiny", "--steps", "2", "--sequence-length", "16"]
FIELDS = {  # DESIGN section 6, to the letter
    "strategy": None,
    "engine": None,
    "world_size": None,
    "status": None,
    "step_time_s": {"median", "min", "q1", "q3", "max", "count"},
    "cpu_share": None,
    "tokens_per_s": None,
    "peak_memory_bytes": {"total", "by_category"},
    "comm": {
        "bytes_per_step",
        "collectives_per_step",
        "exposed_s",
        "on_link_s",
        "copying_s",
        "waiting_s",
        "no_core_s",
        "overlap",
        "blocked_s",
    },
    "steady": {"step_time_s", "exposed_s", "hidden_s", "overlap"},
    "change": {"words", "gain", "peak_bytes", "costs"},
    "losses": None,
    "matches_reference": None,
    "provenance": None,
    "predicted": {"peak_memory_bytes", "comm_bytes_per_step", "step_time_s", "step_scatter", "step_from"},
}


def ended(arguments: list[str], capsys) -> tuple[int, str, str]:
    """Run the command line in this process; its exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    printed = capsys.readouterr()
    return stop.value.code, printed.out, printed.err


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["compare", "--nope"], "No such option: --nope"),
        (["nope"], "No such command 'nope'"),
        (["compare", "--steps", "many"], "--steps"),
        (["compare", "--steps"], "requires an argument"),
        (["compare", "--card", "big"], "300MB"),
        (["compare", "--card", "0"], "300MB"),
        (["run", "--card", "3"], "which is 3 bytes; expected a size such as 300MB"),
        (["compare", "--strategies", "fullshard"], "did you mean full_shard"),
        (["compare", "--strategies", ","], "nothing to compare"),
        (["compare", "--engines", "pytorch"], "torch-fsdp2"),
        (["compare", "--engines", "twin"], "--engines has 'twin'"),
        (
            ["compare", "--engines", "torch-ddp", "--strategies", "zero1"],
            "nothing to compare (torch-ddp does not do zero1)",
        ),
        (["compare", "--strategies", "full_shard:precision=fp9"], "fp32, bf16"),
        (["compare", "--world-size", "0"], "--world-size is 0; expected a whole number"),
        (["compare", "--model", "gpt-9"], "gpt-9"),
        (["compare", "--text", "/no/such/text"], "/no/such/text"),
        (["compare", "--precision", "fp8"], "fp32, bf16"),
        (["compare", "--compile", "blok"], "did you mean blocks"),
        (["run", "--transport", "infiniband"], "auto, shm, gloo, nccl"),
        (["compare", "--sequence-length", "1000000"], "1000000"),
        (["compare", "--html", "/no/such/folder/page.html"], "cannot be written"),
        (["compare", "--json", "/"], "cannot be written"),
        (["run", "zero1", "--engine", "torch-fsdp2"], "cannot do zero1"),
        (["run", "full_shard", "zero1"], "zero1"),
        (["run", "--checkpoint", "some"], "none, selective, full"),
        (["run", "--offload", "tape"], "none, cpu"),
        (["run", "zero2", "--offload", "cpu"], "zero2"),
        (["run", "--link", ""], "link"),
        (["run", "--batch-size", "1000000000000"], "smaller batch"),
        (["run", "--steps", "9" * 20], "--steps is 9"),
        pytest.param(
            ["run", "--device", "cuda", "-n", "1"],
            "no GPU can be used",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        (["run", "--emulate", "1xH100", "--as", "gpt2"], "give at least 2 GPUs"),
        (["compare", "--emulate", "1xH100", "--as", "gpt2"], "give at least 2 GPUs"),
        (["run", "--prefetch", "²"], "--prefetch"),
        (["run", "--card", "9" * 400], "--card"),
        (["run", "[/b]"], "[/b]"),
        (["report"], "see `fsdplab report --help`"),
        (["report", "/no/such/record"], "/no/such/record"),
        (["lab", "--notebooks", "/no/such/folder"], "no notebooks in /no/such/folder"),
        (["lab", "--port", "x"], "--port"),
        (["lab", "--edition", "pupil"], "--edition is 'pupil'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_one_line_and_exit_code_2(arguments, words, capsys):
    code, out, err = ended(arguments, capsys)
    assert (code, out) == (2, "")
    assert err.startswith("fsdplab: ") and err.count("\n") == 1 and words in err


@pytest.mark.parametrize("flags", [["--batch-size", "8"], ["--sequence-length", "32"], ["--text", "README.md"]])
def test_a_flag_of_tokens_is_refused_beside_batches_of_its_own(flags, tmp_path, capsys):
    """They were left unused without a word."""
    model = tmp_path / "mine.py"
    model.write_text("def model(): ...\ndef batch(at): ...\ndef loss(model, batch): ...\n")
    for command in (["compare"], ["run", "full_shard"]):
        code, _, err = ended([*command, "--model", str(model), *flags], capsys)
        assert code == 2 and err.count("\n") == 1, err
        assert err.startswith(f"fsdplab: {flags[0]} is {flags[1]}, but the batches of mine.py are its own;")


def test_files_in_the_way_are_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for arguments in (["compare", "--keep", str(tmp_path / "file")], ["run", "--out", str(tmp_path / "file")]):
        code, _, err = ended([*arguments, *TINY], capsys)
        assert code == 2 and "expected a folder" in err
    code, _, err = ended(["run", "--out", str(tmp_path), *TINY], capsys)
    assert code == 2 and "holds other files" in err and [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_run_that_fails_ends_with_its_report_and_exit_code_1(tmp_path, capsys):
    long = ["run", "full_shard", *TINY, "--steps", "2000", "--time-limit", "0.05", "--out", str(tmp_path / "run")]
    code, _, err = ended(long, capsys)
    assert code == 1 and "0.05 s" in err and "Traceback (most recent call last)" not in err
    assert RunRecord.load(tmp_path / "run").status == "failed"
    code, out, err = ended(["report", str(tmp_path / "run"), "--json", str(tmp_path / "r.json")], capsys)
    assert code == 1 and "failed" in out and "0.05 s" in err, "who shows it says the same"
    assert json.loads((tmp_path / "r.json").read_text())["runs"][0]["status"] == "failed"


def test_a_run_that_failed_after_timed_steps_is_shown_as_failed(tmp_path, capsys):
    summary = Summary(step_time_s=Spread.of([0.4, 0.5, 0.6]), tokens_per_s=9.0, losses=(5.0,))
    spec = {"strategy": "full_shard", "engine": "lab", "world_size": 2}
    failure = {"message": "Rank 1 died in step 7 (forward): it ended with SIGKILL (signal 9)."}
    record = RunRecord(tmp_path / "r", spec=spec, status="failed", failure=failure, summary=summary).save()
    code, out, err = ended(["report", str(record.path), "--html", str(tmp_path / "page.html")], capsys)
    row = next(line for line in out.splitlines() if line.strip().startswith("full_shard"))
    assert code == 1 and " failed " in row and "500 ms" not in row and "Rank 1 died in step 7" in err
    assert ">failed<" in (tmp_path / "page.html").read_text(encoding="utf-8")
    finished = RunRecord(tmp_path / "f", spec=spec, summary=summary).save()
    code, out, err = ended(["report", str(finished.path), "--json", "-"], capsys)
    assert (code, json.loads(out)["runs"][0]["status"]) == (0, "finished")


def test_a_run_may_recompute_and_offload(tmp_path, capsys):
    choices = ["--checkpoint", "full", "--offload", "cpu"]
    code, _, err = ended(["run", "full_shard", *TINY, *choices, "--out", str(tmp_path / "run")], capsys)
    record = RunRecord.load(tmp_path / "run")
    assert (code, record.status) == (0, "finished"), err
    assert (record.spec["checkpoint"], record.spec["offload"]) == ("full", "cpu")


def test_a_comparison_whose_run_fails_shows_its_row_then_names_the_run(tmp_path, capsys):
    code, out, err = ended(
        ["compare", "--strategies", "zero1", *TINY, "--time-limit", "0.05", "--json", str(tmp_path / "c.json")], capsys
    )
    assert code == 1 and "zero1: " in err and "0.05 s" in err and "Traceback (most recent call last)" not in err
    assert "failed" in out and "DIFFER" not in out, "what a failed run sent is not held against the formula"
    assert json.loads((tmp_path / "c.json").read_text())["runs"][0]["comm"]["bytes_per_step"] is None


def test_version_help_and_the_installed_script(capsys):
    assert ended(["--version"], capsys)[:2] == (0, f"fsdplab {fsdplab.__version__}\n")
    code, out, _ = ended([], capsys)
    assert code == 0 and all(name in out for name in ("compare", "run", "report", "doctor", "lab", "course"))
    done = subprocess.run(
        [sys.executable, "-m", "fsdplab", "compare", "--nope"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "command,words",
    [
        (["compare"], [*STRATEGIES, "fsdplab compare --world-size 4"]),
        (["run"], [*STRATEGIES, "--offload", "fsdplab run hybrid_shard"]),
        (["bench"], [*STRATEGIES, "fsdplab bench --compile blocks"]),
        (["report"], ["fsdplab report rank0.json rank1.json"]),
        (["course"], ["build", "test", "site"]),
        (["course", "build"], ["--edition", "fsdplab course build"]),
        (["course", "test"], ["fsdplab course test"]),
        (["course", "site"], ["fsdplab course site"]),
        (["gpu-check"], ["--out", "fsdplab gpu-check --device cpu"]),
        (["lab"], ["fsdplab lab --edition teacher"]),
        (["doctor"], ["fsdplab doctor --json -"]),
        (["plan"], ["step", "fit", "sweep", "simulate", "fsdplab plan --model llama-3.1-70b"]),
        (["plan", "step"], [*STRATEGIES, "--checkpoint", "fsdplab plan --model llama-3.1-70b"]),
    ],
    ids=" ".join,
)
def test_help_names_every_strategy_and_has_examples(command, words, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = ended([*command, "--help"], capfd)
    assert code == 0 and all(word in out for word in ["Examples:", *words]), out


@pytest.mark.parametrize(
    "typed,completed", [("fsdplab comp", ["compare"]), ("fsdplab run zero", ["zero1", "zero2"]), ("fsdplab x", [])]
)
def test_a_shell_completes_commands_and_strategies(typed, completed):
    asked = {"_FSDPLAB_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = subprocess.run(
        [sys.executable, "-m", "fsdplab"], env={**os.environ, **asked}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == completed, done.stderr


def test_course_and_gpu_check_say_no_in_one_line(capfd):
    for arguments, words in (
        (["course", "test", "/no/such/folder"], "/no/such/folder"),
        (["course", "build", "--edition", "pupil"], "pupil"),
        (["gpu-check", "--device", "mars"], "mars"),
        (["gpu-check", "--device", "cpu", "--out", os.path.dirname(__file__)], "which is not empty"),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        said = capfd.readouterr().err
        assert stop.value.code == 2 and words in said and said.count("\n") == 1, said


CHILD = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("ready", flush=True)
time.sleep(60)
"""


def heeds_hangups() -> None:
    """As a terminal starts commands, also where nohup runs the tests: what nohup ignores is not handed on."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize("sent,code", [(signal.SIGTERM, 7), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_signal_is_handed_on_and_the_exit_code_comes_back(tmp_path, sent, code):
    (tmp_path / "waits.py").write_text(CHILD)
    run = "from fsdplab.cli.lab import run_module; import sys; sys.exit(run_module('waits', []))"
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", run], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True,
        preexec_fn=heeds_hangups,
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    process.send_signal(sent)
    assert process.wait(30) == code


def test_engines_and_strategies_are_two_lists_whose_impossible_pairs_are_left_out(monkeypatch, capsys):
    """The lab's engine is one of them, and a setting that only the lab has is none of another engine's."""
    compared = []

    def stop(specs, *_, **__):
        compared.extend((spec.engine, spec.strategy, spec.prefetch) for spec in specs)
        raise SystemExit(0)

    monkeypatch.setattr("fsdplab.sessions.compare", stop)
    lists = ["--engines", "lab,torch-ddp,torch-fsdp2", "--strategies", "no_shard,full_shard,full_shard:prefetch=0"]
    code, _, err = ended(["compare", *lists, *TINY, "-q"], capsys)
    assert code == 0 and compared[:-1] == [
        ("lab", "no_shard", 1), ("lab", "full_shard", 1), ("lab", "full_shard", 0), ("torch-ddp", "no_shard", 1),
        ("torch-fsdp2", "full_shard", 1),
    ]  # fmt: skip
    assert err == (
        "fsdplab: left out: torch-ddp does not do full_shard;"
        " torch-fsdp2 does not do full_shard:prefetch=0; torch-fsdp2 does not do no_shard\n"
    )


@pytest.mark.parametrize("command", [["compare", "--strategies"], ["run"], ["bench", "--strategies"]])
def test_a_strategy_that_is_none_is_refused_before_torch_is_imported(command):
    called = "import sys; from fsdplab.cli import main\ntry: main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", called, *command, "full_sharrd"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "False\n" and "did you mean full_shard" in done.stderr


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build of torch is asked for its GPUs")
def test_who_compares_does_not_import_torch_itself(tmp_path):
    """The starter and the ranks do: on two cores a second import would take the first one's time."""
    page = str(tmp_path / "page.html")
    arguments = ["compare", *TINY, "--strategies", "full_shard", "--html", page]
    called = "import sys; from fsdplab.cli import main\ntry: main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", called, *arguments], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "False", done.stdout + done.stderr
    assert os.path.getsize(page) > 100_000


def test_quiet_prints_the_table_only_and_verbose_every_step(tmp_path, capsys):
    out = ["--out", str(tmp_path / "run")]
    code, quiet, _ = ended(["run", "zero1", *TINY, *out, "-q"], capsys)
    assert code == 0 and "zero1" in quiet
    noise = ("Measured", "Simulated", "step 1", "batch 1 x", "timed step", "loses", "->")
    assert not any(word in quiet for word in noise)
    (tmp_path / "run" / "ranks").mkdir(exist_ok=True)
    (tmp_path / "run" / "ranks" / "rank1.out").write_text("hello\n")
    code, verbose, _ = ended(["report", str(tmp_path / "run"), "-v"], capsys)
    assert code == 0 and "zero1, rank1: hello" in verbose and "measured" in verbose
    code, verbose, _ = ended(["run", "zero1", *TINY, *out, "-v", "--force"], capsys)
    assert code == 0 and "zero1: warm-up step 1 of 2" in verbose and "zero1: timed step 2 of 2" in verbose
    code, _, err = ended(["run", "zero1", *TINY, "-q", "-v"], capsys)
    assert code == 2 and "--quiet and --verbose" in err


def test_doctor_says_what_is_here(capsys):
    code, out, _ = ended(["doctor", "--json", "-"], capsys)
    found = json.loads(out)
    assert code == 0 and set(found) == {"format", "findings", "real", "emulated", "simulated", "verdict"}
    by_name = {item["name"]: item for item in found["findings"]}
    assert by_name["gloo"]["present"] and by_name["torch"]["value"].startswith("2.")
    carries = by_name["CPU transport"]["value"]
    assert carries in ("shared memory", "gloo") and f"CPU processes over {carries}" in found["real"]
    assert set(by_name["cores"]) == {"name", "present", "value", "note"}
    code, out, _ = ended(["doctor"], capsys)
    assert code == 0 and "gloo" in out and "emulated" in out
    assert out.splitlines()[-1].startswith(("ready for: ", "not for: "))


def test_the_verdict_says_what_to_do_about_what_lacks():
    names = ("gloo", "plotly", "jupyterlab", "ipywidgets", "pandas", "deepspeed", "GPUs")
    notes = {name: f"note on {name}" for name in names}

    def said(present):
        return [f"{line.label}: {line.text}" for line in verdict_lines(readiness(present, notes))]

    assert said(dict.fromkeys(names, True)) == [
        "ready for: plans and recorded runs (plan, report); training on CPU ranks (compare, run, bench); pages and"
        " figures (--html, --figure); the course (lab, course); DeepSpeed beside our engine (--engines"
        " lab,deepspeed-3); training on GPUs (gpu-check, --device cuda)"
    ]
    lacking = said({**dict.fromkeys(names, True), "gloo": False, "pandas": False})
    assert lacking[1:] == [
        "not for: training on CPU ranks (compare, run, bench): lacks gloo; do: note on gloo",
        f"not for: the course (lab, course): lacks pandas; do: {how_to_install('lab')}",
    ]
    assert "compare" not in lacking[0] and "--html" in lacking[0]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """One small comparison through the real command: what it printed, and the folder that it wrote into."""
    folder = tmp_path_factory.mktemp("comparison")
    command = [
        sys.executable, "-m", "fsdplab", "compare", "--strategies", "no_shard,full_shard", *TINY, "--card", "1GB",
        "--json", str(folder / "c.json"), "--html", str(folder / "c.html"), "--keep", str(folder / "records"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout, folder


@pytest.mark.default
def test_json_has_exactly_the_promised_fields(comparison):
    written = json.loads((comparison[1] / "c.json").read_text())
    assert set(written) == {"format", "spec", "environment", "in_turns", "drift", "runs"} and written["format"] == 2
    assert written["in_turns"] is True and written["drift"] is None
    assert [run["strategy"] for run in written["runs"]] == ["no_shard", "full_shard"]
    for run in written["runs"]:
        assert list(run) == list(FIELDS)
        for name, parts in FIELDS.items():
            assert parts is None or set(run[name]) == parts
        assert set(run["peak_memory_bytes"]["by_category"]) == set(CATEGORIES)
        assert run["comm"]["bytes_per_step"] == run["predicted"]["comm_bytes_per_step"]


def test_both_runs_agree_with_the_twin(comparison):
    for run in json.loads((comparison[1] / "c.json").read_text())["runs"]:
        # warm-up, timed, profiled
        assert run["matches_reference"] is True and len(run["losses"]) == 2 + 2 + 2


def test_rows_appear_one_by_one_then_the_table_and_what_was_real(comparison):
    out = comparison[0]
    assert out.splitlines()[1] == (
        "Each run warms up alone and then waits; their timed steps take turns, and a run's row is complete at the end."
    )
    first, second = out.index("no_shard: step "), out.index("full_shard: step ")
    assert first < second < out.index("FSDP (full_shard) needs ") < out.index("simulated  simulated")
    assert all(text in out for text in ("a card of 1.00 GB", "a link of ", "agree", "Simulated: the steady card"))
    assert len(out.splitlines()) <= 30 and "not calibrated" not in out


def test_a_run_over_its_card_goes_on_and_is_marked(tmp_path, capsys):
    code, out, _ = ended(["run", "no_shard", *TINY, "--card", "1MB", "--out", str(tmp_path / "run")], capsys)
    assert code == 0 and ", over the card" in out and "out of memory" not in out
    record = RunRecord.load(tmp_path / "run")
    assert record.status == "finished" and record.summary.card.exceeded and record.summary.step_time_s.median


def test_page_is_written(comparison):
    page = (comparison[1] / "c.html").read_text(encoding="utf-8")
    assert "the card is emulated and holds 1.00 GB" in page and " peaks at " in page


def test_report_reads_the_kept_records_and_says_the_same(comparison, capsys):
    out, folder = comparison
    kept = sorted(str(path) for path in (folder / "records").iterdir())
    assert len(kept) == 3
    code, printed, shown = ended(["report", *kept, "--json", "-"], capsys)
    assert code == 0 and json.loads(printed) == json.loads((folder / "c.json").read_text())
    assert "agree" in shown and "FSDP (full_shard) needs " in shown
    code, of_the_folder, _ = ended(["report", str(folder / "records"), "--json", "-", "-q"], capsys)
    assert code == 0 and of_the_folder == printed


def two_runs(record):
    """The run of a record, and another that is planned beside it."""
    spec = RunSpec(**record.spec)
    return {record.path: spec, record.path / "other": replace(spec, strategy="zero1")}


def test_progress_in_a_terminal_shows_a_run_that_waits_and_completes_its_row(comparison):
    record, twin = (RunRecord.load(sorted((comparison[1] / "records").iterdir())[number]) for number in (1, 2))
    waits = replace(record, summary=replace(record.summary, step_time_s=Spread()))
    planned = two_runs(record)

    def drawn(*events):
        """The last state that a terminal shows after some events."""
        console = Console(force_terminal=True, width=170, file=io.StringIO())
        with ProgressTable(console, planned) as progress:
            for name, *arguments in events:
                getattr(progress, name)(*arguments)
        return console.file.getvalue()

    ready = [("ready", waits), ("ready", twin)]
    assert "Their timed steps take turns." in drawn(*ready, ("note", "Their timed steps take turns."))
    assert " waits " in drawn() and "ms" in drawn(), "the steady card's step is known before anything runs"
    waiting = drawn(*ready, ("progressed", RunSpec(**record.spec), 3, 6, 5.25))
    assert (
        "full_shard: timed step 1 of 2" in waiting
        and " measuring " in waiting
        and "0 of 2 runs done, 1 being measured" in waiting
        and "twin" not in waiting
    )
    whole = drawn(*ready, ("ended", record), ("progressed", RunSpec(**twin.spec), 2, 6, 5.25))
    assert " measuring " not in whole and "1 of 2 runs done)" in whole
    assert "the twin, for reference: warm-up step 2 of 2" in whole


def test_progress_that_is_piped_prints_a_row_when_it_is_complete(comparison):
    record = RunRecord.load(sorted((comparison[1] / "records").iterdir())[1])
    console = Console(width=170, file=io.StringIO())
    with ProgressTable(console, two_runs(record)) as progress:
        progress.note("Their timed steps take turns.")
        progress.ended(record)
    note, row = console.file.getvalue().splitlines()
    assert (
        note == "Their timed steps take turns."
        and row.startswith("full_shard: step ")
        and "(1 of 2 runs)" in row
        and "measuring" not in row
    )
    quiet = Console(width=170, file=io.StringIO())
    with ProgressTable(quiet, two_runs(record), Outputs(quiet=True)) as progress:
        progress.note("Their timed steps take turns.")
        progress.ended(record)
    assert quiet.file.getvalue() == ""


def test_a_step_of_one_of_two_runs_of_a_strategy_says_which_one(comparison):
    record = RunRecord.load(sorted((comparison[1] / "records").iterdir())[1])
    ahead, none = (replace(RunSpec(**record.spec), prefetch=depth) for depth in (1, 0))
    console = Console(width=100, file=io.StringIO())
    with ProgressTable(console, {record.path: ahead, record.path / "none": none}, Outputs(verbose=True)) as progress:
        progress.progressed(none, 1, 6, 5.25)
    assert console.file.getvalue() == "full_shard, prefetch 0: warm-up step 1 of 2, rank 0's loss 5.2500\n"


def test_a_terminal_of_80_columns_breaks_no_number_from_its_unit():
    comm, clock = Comm(bytes_per_step=128_944_128), Steady(1.48, 0.3, 0.65)
    summary = Summary(Spread.of([1.2, 1.2, 1.5, 1.8]), peak_memory_bytes=Peak(373_000_000), comm=comm, steady=clock)
    view = RunView("shard_grad_op", "lab", 2, summary, spec={"card": 330_000_000}, matches=True)
    console = Console(width=80, file=io.StringIO())
    both = [view, replace(view, strategy="full_shard", note="prefetch 0")]
    show(console, parts_of_runs(both, None, Outputs(quiet=True)))
    shown = console.file.getvalue()
    for whole in ("shard_grad_op ", "129 MB ", " 1.48 s ", " 65 % ", "1.35 s ±14 %", "Losses agree with the unsharded"):
        assert whole in shown, shown
    assert max(map(len, shown.splitlines())) <= 80
    console = Console(width=80, file=io.StringIO())
    show(console, parts_of_runs([view, replace(view, matches=False)], None, Outputs(quiet=True)))
    assert "Losses agree" not in console.file.getvalue() and "its losses differ" in console.file.getvalue()


@pytest.mark.parametrize("quiet", [[], ["-q"]])
def test_a_drift_is_printed_below_the_table(comparison, tmp_path, quiet, capsys):
    folder = tmp_path / "records"
    shutil.copytree(comparison[1] / "records", folder)
    first = RunRecord.load(folder / "0-no_shard-lab")
    first.summary = replace(first.summary, again_s=1.5 * first.summary.step_time_s.median)
    first.save()
    code, out, _ = ended(["report", str(folder), *quiet], capsys)
    assert code == 0 and out.count("no_shard was run again last, and its step took 50% longer") == 1


def test_progress_in_a_terminal_shows_finished_rows_and_the_step_of_the_next(comparison):
    record = RunRecord.load(sorted((comparison[1] / "records").iterdir())[1])
    console = Console(force_terminal=True, width=150, file=io.StringIO())
    with ProgressTable(console, two_runs(record)) as progress:
        progress.ended(record)
        progress.progressed(RunSpec(model="gpt-tiny", engine="torch-ddp", strategy="no_shard", steps=4), 8, 10, 5.25)
    drawn = console.file.getvalue()
    assert (
        "full_shard" in drawn
        and "torch-ddp: profiled step 2 of 4, rank 0's loss 5.2500" in drawn
        and "1 of 2 runs done" in drawn
    )


def test_sizes_and_names():
    texts = ["300MB", "1.5GB", " 2 GiB ", "300_000_000", "64kb", "none", "None"]
    assert [card_of(text, {}, "330MB") for text in texts] == [
        300_000_000,
        1_500_000_000,
        2 * 2**30,
        300_000_000,
        64_000,
        None,
        None,
    ]
    assert names(" a, b,,c ") == ["a", "b", "c"]
    for wrong in ("", "MB", "3 apples", "-1MB", "0"):
        with pytest.raises(SystemExit):
            card_of(wrong, {}, "330MB")


def test_a_folder_that_cannot_be_written_is_one_line_and_exit_code_2(capsys):
    code, _, err = ended(["run", "--model", "gpt-tiny", "--out", "/dev/null/x"], capsys)
    assert code == 2 and err.count("\n") == 1 and "give a writable place" in err
