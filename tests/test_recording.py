"""`fsdplab record`: jobs that were written for no lab (tests/jobs) run as they would, and become records."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fsdplab import Recorder, open_record
from fsdplab.profiling.findings import findings
from fsdplab.profiling.loop_faults import micro_batches
from fsdplab.profiling.step_facts import Activity
from fsdplab.profiling.vocabulary import _BY_ENGINE, _BY_TRAINER, _LAB, _OF_AN_ENGINE, words_of
from fsdplab.recording.assemble import NothingRecorded
from fsdplab.recording.launch import _job_end
from fsdplab.recording.rank import RankRecorder, Round
from fsdplab.recording.settings import BOOTSTRAP, RecordingError, Settings, steps_of
from fsdplab.records import RecordError, RunRecord
from fsdplab.sessions.cell_ranks.ranks import StayingRanks

JOBS = Path(__file__).parent / "jobs"
ROOT = Path(__file__).parents[1]
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


def environment(**more: str) -> dict[str, str]:
    quiet = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    return {**os.environ, **quiet, **more}


def run(*words: object, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd, env=environment(**more))


# Ranks of torch 2.13 over gloo abort so now and then when they end, on a busy machine: 1 of 12 runs without a recorder.
ABORTED = "terminate called without an active exception"


def run_job(folder: Path, *words: object, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """A job whose record is in `folder`, run once more where torch aborted its ranks as they ended."""
    done = run(*words, cwd=cwd, **more)
    if done.returncode and ABORTED in done.stderr:
        shutil.rmtree(folder, ignore_errors=True)
        done = run(*words, cwd=cwd, **more)
    return done


def recorded(folder: Path, *job: object, **more: str) -> subprocess.CompletedProcess[str]:
    command = ("-m", "fsdplab", "record", "-q", "--out", folder, "--", sys.executable, *job)
    return run_job(folder, *command, cwd=folder.parent, **more)


def losses_in(printed: str) -> list[str]:
    return sorted(re.findall(r"(?:rank \d )?step \d+ loss \S+", printed))


# ---- whole jobs


@pytest.mark.timeout(400)
def test_an_fsdp2_loop_trains_as_it_would_and_becomes_a_record(tmp_path):
    """Its losses are the unrecorded job's bit for bit, and nothing is written outside the folder."""
    for name in ("home", "temporary", "there"):
        (tmp_path / name).mkdir()
    apart = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "temporary"), "PYTHONDONTWRITEBYTECODE": "1"}
    job = (*TORCHRUN, JOBS / "fsdp2_loop.py", "--lr", "1e-3", "--steps", "24")
    alone = run_job(tmp_path / "none", *job, cwd=tmp_path / "there", **apart)
    done = recorded(tmp_path / "there" / "out", *job, **apart)
    assert (alone.returncode, done.returncode) == (0, 0), done.stderr
    assert losses_in(done.stdout) == losses_in(alone.stdout) != []
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["out"]
    assert not any(file.is_file() for name in ("home", "temporary") for file in (tmp_path / name).rglob("*"))

    record = RunRecord.load(tmp_path / "there" / "out")
    assert record.status == "finished" and not (record.path / "ranks").exists()
    told = {name: record.spec[name] for name in ("job", "engine", "strategy", "model", "world_size", "precision")}
    assert told == {
        "job": "fsdp2_loop.py", "engine": "torch-fsdp2", "strategy": "full_shard", "model": "Network", "world_size": 2,
        "precision": "fp32",
    }  # fmt: skip
    parameters = sum(
        each.numel() for each in [*torch.nn.Linear(256, 1024).parameters(), *torch.nn.Linear(1024, 256).parameters()]
    )
    parameters = 4 * (4 * (parameters + 2 * 256) + 10 * 257)
    split = record.summary.peak_memory_bytes.split
    assert split["sharded_parameters"] == pytest.approx(parameters / 2, rel=0.01)
    assert split["optimizer_state"] == pytest.approx(parameters, rel=0.01)
    # gathered twice and reduced once, half of it from each rank; the root is not gathered again
    assert record.summary.comm.bytes_per_step == pytest.approx(3 * parameters / 2, rel=0.01)
    assert len(record.summary.losses) == 24 and {row["step"] for row in record.table("breakdown")} == {*range(8, 16)}
    assert {path.name for path in (record.path / "traces").iterdir()} == {
        f"rank{rank}.pt.trace.json.gz" for rank in (0, 1)
    }
    memory = next(each for each in findings(record) if each.of == "memory")
    assert "fully_shard" in memory.remedy

    page = run("-m", "fsdplab", "report", record.path, "--html", tmp_path / "page.html", cwd=tmp_path)
    assert page.returncode == 0, page.stderr
    assert "Where a step of fsdp2_loop.py goes" in (tmp_path / "page.html").read_text(encoding="utf-8")


DDP = ("ddp_loop.py", "torch-ddp", "no_shard")
ALL = ("", "full_shard", 2)


@pytest.mark.parametrize(
    "job,engine,strategy",
    [pytest.param(*DDP, marks=pytest.mark.default), ("fsdp1_loop.py", "torch-fsdp1", "shard_grad_op")],
)
def test_other_engines_of_torch(job, engine, strategy, tmp_path):
    done = recorded(tmp_path / "out", *TORCHRUN, JOBS / job)
    record = RunRecord.load(tmp_path / "out")
    assert done.returncode == 0 and (record.spec["engine"], record.spec["strategy"]) == (engine, strategy), done.stderr
    assert record.summary.peak_memory_bytes.split["optimizer_state"] and record.summary.comm.bytes_per_step
    if job == "ddp_loop.py":  # a step is one of the optimizer, whatever it accumulates; evaluations are not timed
        untimed = {row["step"] for row in record.table("steps") if row["step_time_s"] is None}
        assert untimed == {0, 5, 15} and all(row["loading_s"] for row in record.table("steps") if row["step"] == 3)


@pytest.mark.parametrize("keeps,strategy,gathers", [ALL, (", reshard_after_forward=False", "shard_grad_op", 1)])
def test_the_labs_own_engine_says_what_it_sends(keeps, strategy, gathers, tmp_path):
    text = (JOBS / "fsdp2_loop.py").read_text(encoding="utf-8")
    text = text.replace("from torch.distributed.fsdp import", "from fsdplab.engine import")
    (tmp_path / "loop.py").write_text(text.replace("fully_shard(block)", f"fully_shard(block{keeps})"))
    done = recorded(tmp_path / "out", *TORCHRUN, tmp_path / "loop.py")
    record = RunRecord.load(tmp_path / "out")
    told = {name: record.spec[name] for name in ("engine", "strategy", "precision", "unit_count")}
    assert done.returncode == 0, done.stderr
    assert told == {"engine": "lab", "strategy": strategy, "precision": "fp32", "unit_count": 5}
    blocks, root = 4 * (2 * 4 * 256 * 256 + 5 * 256 + 2 * 256), 10 * 257
    assert record.summary.comm.bytes_per_step == 4 * ((gathers + 1) * blocks + 2 * root) // 2
    assert record.summary.comm.collectives_per_step == (gathers + 1) * 4 + 2
    assert not any("bytes sent" in note for note in record.summary.notes)


@pytest.mark.full("another way to start ranks")
def test_ranks_that_torch_spawns_and_an_optimizer_that_shards_its_state(tmp_path):
    done = recorded(tmp_path / "out", JOBS / "spawned.py", MEETING=str(tmp_path / "meeting"))
    record = RunRecord.load(tmp_path / "out")
    assert done.returncode == 0 and record.spec["strategy"] == "zero1", done.stderr
    whole = 4 * (128 * 128 + 128)
    split = record.summary.peak_memory_bytes.split
    assert split["sharded_parameters"] == whole and 0 < split["optimizer_state"] <= 2 * whole


def test_transformers_trainer(tmp_path):
    pytest.importorskip("transformers")
    done = recorded(tmp_path / "out", *TORCHRUN, JOBS / "trainer.py", tmp_path / "of_trainer")
    record = RunRecord.load(tmp_path / "out")
    assert done.returncode == 0 and len(record.summary.losses) == 20, done.stderr
    assert (record.spec["engine"], record.spec["trainer"]) == ("torch-ddp", "Trainer")
    assert "TrainingArguments" in next(each for each in findings(record) if each.of == "memory").remedy


def with_a_callback(tmp_path: Path, name: str, job: str, *words: object) -> RunRecord:
    """The record that a callback made of a job whose `main` takes callbacks."""
    imports = f"import sys\nsys.path.insert(0, {str(JOBS)!r})\nimport fsdplab, {name}\n"
    (tmp_path / "job.py").write_text(f"{imports}if __name__ == '__main__':\n    {job}\n")
    done = run_job(tmp_path / "out", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    return open_record(tmp_path / "out")


@pytest.mark.parametrize("shards,engine", [(2, "torch-fsdp2"), (1, "torch-ddp")])
def test_a_callback_of_transformers_trainer(shards, engine, tmp_path):
    """Two micro-batches a step; everything that it sends is known, with the counts of tokens that it gathers."""
    pytest.importorskip("transformers")
    job = f"trainer.main([fsdplab.trainer_callback('out')], shards={shards})"
    record = with_a_callback(tmp_path, "trainer", job, *TORCHRUN, "job.py", tmp_path / "of_trainer")
    assert (record.spec["engine"], record.spec["trainer"]) == (engine, "Trainer")
    assert len(record.summary.losses) == 20 and record.summary.comm.bytes_per_step
    assert record.table("memory") and {row["step"] for row in record.table("breakdown")} == {*range(8, 16)}


@pytest.mark.peers
@pytest.mark.parametrize("strategy,engine", [("ddp", "torch-ddp"), ("model-parallel", "torch-fsdp2")])
def test_a_callback_of_lightning(strategy, engine, tmp_path):
    """Lightning refuses its strategy `fsdp` on CPU ranks; ModelParallelStrategy is PyTorch's fully_shard there."""
    pytest.importorskip("lightning")
    of_a_mesh = "lightning.pytorch.strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)"
    how = repr(strategy) if strategy == "ddp" else f"lightning_loop.{of_a_mesh}"
    job = f"lightning_loop.main([fsdplab.lightning_callback('out')], {how})"
    record = with_a_callback(tmp_path, "lightning_loop", job, "job.py")
    assert (record.spec["engine"], record.spec["trainer"]) == (engine, "Lightning")
    assert len(record.summary.losses) == 24 and record.summary.comm.bytes_per_step
    assert record.table("memory") and {row["step"] for row in record.table("breakdown")} == {*range(8, 16)}


# What srun does for a job on one machine: one process a task, told by SLURM_* which one it is.
SRUN = """#!/bin/bash
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=2 "$@" &
    tasks[$task]=$!
done
wait ${tasks[0]} && wait ${tasks[1]}
"""


@pytest.mark.full("another way to start ranks")
def test_tasks_of_a_stand_in_for_srun(tmp_path):
    """No launcher of torch's: the job itself makes torch's variables of Slurm's."""
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    task = f"RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS exec {sys.executable} {JOBS / 'fsdp2_loop.py'} --steps 16"
    command = ("-m", "fsdplab", "record", "-q", "--out", "out", "--", tmp_path / "srun", "bash", "-c", task)
    done = run_job(tmp_path / "out", *command, cwd=tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    record = RunRecord.load(tmp_path / "out")
    assert done.returncode == 0 and record.spec["world_size"] == 2, done.stderr[-3000:]
    assert (
        {row["rank"] for row in record.table("steps")} == {row["rank"] for row in record.table("breakdown")} == {0, 1}
    )


@pytest.mark.peers
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_engine(stage, tmp_path):
    """A step of two micro-batches; a scalar that is reduced has bytes too."""
    pytest.importorskip("deepspeed")
    done = recorded(tmp_path / "out", *TORCHRUN, JOBS / "deepspeed_loop.py", stage)
    record = RunRecord.load(tmp_path / "out")
    assert done.returncode == 0 and record.spec["engine"] == f"deepspeed-{stage}", done.stderr[-3000:]
    assert len(record.summary.losses) == 20 and record.summary.comm.bytes_per_step
    assert record.summary.peak_memory_bytes.split["optimizer_state"]


NOT_KEPT = "stage3_param_persistence_threshold=0"
ALL_AGAIN = ("stage3_max_live_parameters=0", "stage3_max_reuse_distance=0")


@pytest.mark.peers
@pytest.mark.parametrize(
    ("keys", "part"), [((), 1 / 2), ((NOT_KEPT,), 2 / 3), ((NOT_KEPT, *ALL_AGAIN), 1)], ids=["default", "small", "all"]
)
def test_what_deepspeeds_third_stage_keeps_it_does_not_send(keys, part, tmp_path):
    """The formula gathers all parameters twice a micro-batch. Small ones stay gathered by default, and are gathered
    once a step, after its update; what is gathered in the forward stays until the backward where that is near.
    """
    pytest.importorskip("deepspeed")
    done = recorded(tmp_path / "out", *TORCHRUN, JOBS / "deepspeed_loop.py", 3, *keys)
    assert done.returncode == 0, done.stderr[-3000:]
    model, micro_batches, ranks = 4 * 3 * (2 * 128 * 512 + 512 + 128), 2, 2  # bytes of its parameters
    formula = micro_batches * 3 * model * (ranks - 1) // ranks
    scalar = 8  # a norm, all-reduced
    sent = RunRecord.load(tmp_path / "out").summary.comm.bytes_per_step
    assert sent - scalar == pytest.approx(formula * part)


def test_several_optimizers_and_a_step_that_the_scaler_skips(tmp_path):
    """The last optimizer of the first round ends a step; a skipped one is a step."""
    done = recorded(tmp_path / "out", JOBS / "gan.py")
    record = RunRecord.load(tmp_path / "out")
    assert done.returncode == 0 and record.status == "finished", done.stderr
    printed = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(record.summary.losses) == len(printed) == 20
    for step in (0, 1, 10, 19):
        assert record.summary.losses[step] == pytest.approx(printed[step], abs=1e-6)
    assert record.summary.losses[5] is None  # the loss that was infinite


@pytest.mark.full
@pytest.mark.parametrize("micro_batches,accused", [(1, False), (3, True)])
def test_optimizers_that_take_turns_are_no_micro_batches(micro_batches, accused, tmp_path):
    """Each of two backwards of a GAN's step needs its reduction; of three before each optimizer's step two do not."""
    done = recorded(tmp_path / "out", *TORCHRUN, JOBS / "ddp_gan.py", micro_batches)
    assert done.returncode == 0, done.stderr[-3000:]
    titles = [finding.title for finding in findings(RunRecord.load(tmp_path / "out"))]
    assert any(f"reduced {micro_batches} times a step" in title for title in titles) == accused, titles
    assert not any("reduced 2 times" in title or "stays on its rank" in title for title in titles), titles


def test_a_turn_begins_with_the_first_backward_after_a_step():
    recorder = RankRecorder(Settings("nowhere", 8, 16))
    for _ in range(2):  # two optimizers, of two micro-batches each
        for _ in range(2):
            recorder.note_loss(torch.tensor(1.0))
        recorder.has_stepped()
    assert recorder.taken.activities["turn"][0] == 2
    often = {"backward": Activity(0, 4, 0, 0, 1.0), "turn": Activity(0, 2, 0, 0, 1.0)}
    assert micro_batches(SimpleNamespace(activities=often)) == 2
    assert micro_batches(SimpleNamespace(activities={"backward": often["backward"]})) == 4  # of an earlier record


# ---- how jobs end


def test_a_job_that_never_steps_leaves_nothing(tmp_path):
    done = recorded(tmp_path / "out", JOBS / "plain.py", "--steps", 0)
    assert done.returncode == 0 and "no rank took an optimizer step: nothing was recorded" in done.stderr
    assert not (tmp_path / "out").exists()
    isolated = recorded(tmp_path / "out", "-E", JOBS / "plain.py")
    assert isolated.returncode == 0 and "nothing was recorded" in isolated.stderr


@pytest.mark.parametrize("steps,earlier", [(9, "4:5"), (8, "4:5"), (11, "5:6")])
def test_a_job_that_is_too_short_says_what_to_record(steps, earlier, tmp_path):
    """It may end while its memory is measured, in the step after that, or while it is profiled."""
    done = recorded(tmp_path / "out", JOBS / "plain.py", "--steps", steps, "--ends-by", "exit")
    record = RunRecord.load(tmp_path / "out")
    assert done.returncode == 7 and record.status == "failed" and "exit code 7" in record.failure["message"]
    assert any(f"record it again with --steps {earlier}" in note for note in record.summary.notes)
    assert len(record.summary.losses) == steps


def test_a_rank_that_is_killed_after_its_measured_steps_leaves_a_whole_record(tmp_path):
    done = recorded(tmp_path / "out", JOBS / "plain.py", "--steps", 16, "--ends-by", "kill")
    record = RunRecord.load(tmp_path / "out")
    assert done.returncode == 128 + signal.SIGKILL and record.status == "finished"
    assert "the job ended with exit code 137" in record.summary.notes
    assert record.table("memory") and record.table("breakdown") and len(record.summary.losses) >= 13


def test_an_earlier_record_stays(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text('{"format": "fsdplab run record 2"}')
    done = recorded(tmp_path / "out", JOBS / "plain.py")
    assert done.returncode == 2 and "holds an earlier record, which stays" in done.stderr and not done.stdout
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run.json"]


def test_a_command_that_does_not_exist_is_refused(tmp_path):
    done = run("-m", "fsdplab", "record", "--out", tmp_path / "out", "--", "no-such-program", cwd=tmp_path)
    assert done.returncode == 2 and "no-such-program cannot be started" in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_interrupted_launcher_ends_its_job_and_passes_its_code_on(tmp_path):
    command = [sys.executable, "-m", "fsdplab", "record", "--out", "out", "--", sys.executable, str(JOBS / "plain.py")]
    launcher = subprocess.Popen(
        [*command, "--steps", "1000000"], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    for line in launcher.stdout:
        if line.startswith("step 30 "):
            break
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=100)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert RunRecord.load(tmp_path / "out").status == "finished"


UNDER_NOHUP = """
import signal, sys
from pathlib import Path
from fsdplab.recording.launch import prepare, run_job
from fsdplab.recording.settings import Settings
signal.signal(signal.SIGHUP, signal.SIG_IGN)
settings = Settings(sys.argv[1], 10, 13, job="job")
prepare(settings)
sys.exit(run_job([sys.executable, "-c", sys.argv[2]], settings).code)
"""
OF_ITS_OWN_MIND = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("ready", flush=True)
signal.pause()
"""


def test_a_signal_that_is_ignored_as_by_nohup_is_not_passed_on(tmp_path):
    """torchrun handles SIGHUP, so that a job under nohup ended with its terminal."""
    command = [sys.executable, "-c", UNDER_NOHUP, str(tmp_path / "out"), OF_ITS_OWN_MIND]
    launcher = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None and launcher.stdout.readline() == "ready\n"
    for which in (signal.SIGHUP, signal.SIGTERM):
        launcher.send_signal(which)
    launcher.communicate(timeout=100)
    assert launcher.returncode == 7


COUNTS_SIGNALS = """
import signal, sys, time
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(1))
print("ready", flush=True)
while not asked:
    time.sleep(0.01)
time.sleep(0.3)
sys.exit(10 + len(asked))
"""


def test_a_signal_to_the_whole_group_reaches_a_job_without_a_terminal_once(tmp_path):
    """torchrun begins to shut its workers down at the first, and a second one interrupts that."""
    command = [sys.executable, "-c", UNDER_NOHUP, str(tmp_path / "out"), COUNTS_SIGNALS]
    launcher = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True, stdin=subprocess.DEVNULL
    )
    assert launcher.stdout is not None and launcher.stdout.readline() == "ready\n"
    os.killpg(launcher.pid, signal.SIGINT)
    launcher.communicate(timeout=100)
    assert launcher.returncode == 11


NEVER_STEPS = "import time; print('ready', flush=True); time.sleep(100)"


def test_ctrl_c_in_a_terminal_before_the_first_step_is_one_sentence(tmp_path):
    terminal, its_end = os.openpty()

    def take_the_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    command = [sys.executable, "-m", "fsdplab", "record", "--out", "out", "--", sys.executable, "-c", NEVER_STEPS]
    launcher = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdin=its_end, stdout=its_end, stderr=its_end,
        start_new_session=True, preexec_fn=take_the_terminal,
    )  # fmt: skip
    os.close(its_end)
    printed = b""
    while True:
        try:
            printed += os.read(terminal, 4096)
        except OSError:  # nobody has its other end any more
            break
        if printed.endswith(b"ready\r\n"):
            os.write(terminal, b"\x03")
    os.close(terminal)
    assert launcher.wait(timeout=100) == 128 + signal.SIGINT
    _, _, after = printed.decode().partition("^C")
    (line,) = after.splitlines()
    assert line.startswith("fsdplab: the job python") and "interrupted by Ctrl-C before it had finished" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "code,asked_by,ended",
    [
        (0, None, (0, None)), (7, None, (7, None)), (1, None, (1, None)), (-9, None, (137, None)),
        # torchrun ends with 1 after a signal, Python by SIGINT itself; 0 and 7 are what a job chose
        (1, 2, (130, 2)), (-2, 2, (130, 2)), (1, 15, (143, 15)), (0, 2, (0, None)), (7, 15, (7, 15)),
    ],
)  # fmt: skip
def test_a_job_that_was_asked_to_end_has_the_signals_exit_code(code, asked_by, ended):
    assert _job_end(code, asked_by) == ended


# ---- what the recording must not do


@pytest.mark.parametrize("place", ["window.Window._begin_profile", "batches.tree_leaves"])
def test_a_failure_of_the_recording_does_not_fail_the_job(tmp_path, place):
    """The user's own sitecustomize runs too: this one breaks the recording, between two steps or in a forward."""
    (tmp_path / "site").mkdir()
    broken = "from fsdplab.recording import batches, window\n\ndef fail(*_):\n    raise MemoryError('injected')\n\n"
    (tmp_path / "site" / "sitecustomize.py").write_text(f"{broken}{place} = fail\n")
    above = os.pathsep.join([str(ROOT), str(tmp_path / "site")])
    done = recorded(tmp_path / "out", JOBS / "plain.py", PYTHONPATH=above)
    alone = run(JOBS / "plain.py", cwd=tmp_path)
    assert done.returncode == 0 and "MemoryError: injected" in done.stderr
    assert losses_in(done.stdout) == losses_in(alone.stdout)
    record = RunRecord.load(tmp_path / "out")
    assert any("the recording ended in step" in note for note in record.summary.notes) and record.table("memory")


def test_the_jobs_own_profiler_comes_first(tmp_path):
    done = recorded(tmp_path / "out", JOBS / "plain.py", "--profile", 10)
    record = RunRecord.load(tmp_path / "out")
    assert done.returncode == 0 and record.table("memory") and not record.table("breakdown")
    assert any("the job's own profiler began in step 10" in note for note in record.summary.notes)


@pytest.mark.parametrize("how", ["--in-backward", "--compile"])
def test_compiled_steps_and_steps_inside_the_backward(how, tmp_path):
    done = recorded(tmp_path / "out", JOBS / "plain.py", how)
    alone = run(JOBS / "plain.py", how, cwd=tmp_path)
    record = RunRecord.load(tmp_path / "out")
    assert done.returncode == 0 and losses_in(done.stdout) == losses_in(alone.stdout), done.stderr
    assert len(record.summary.losses) == 20 and record.table("memory") and record.table("breakdown")


def test_two_jobs_under_one_command_are_told_apart(tmp_path):
    both = f"import subprocess, sys; [subprocess.run([sys.executable, {str(JOBS / 'plain.py')!r}]) for _ in 'ab']"
    done = recorded(tmp_path / "out", "-c", both)
    record = RunRecord.load(tmp_path / "out")
    assert done.returncode == 0 and len(record.summary.losses) == 20
    assert any("a second process took steps as this rank" in note for note in record.summary.notes)


# ---- by hand


def loop(recorder: Recorder, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(8, 16)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        recorder.step(loss=loss, tokens=8)
    return losses


def test_by_hand_in_a_loop(tmp_path):
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    recorder = Recorder(tmp_path / "out", model, optimizer, steps="4:6", job="a cell")
    loop(recorder, model, optimizer, 3)
    with pytest.raises(RecordError, match="1 rank of the job still record"):
        open_record(tmp_path / "out")
    loop(recorder, model, optimizer, 20)
    record = open_record(tmp_path / "out")
    assert record.spec["job"] == "a cell" and {row["step"] for row in record.table("breakdown")} == {4, 5}
    assert record.summary.peak_memory_bytes.split["optimizer_state"] == 2 * 4 * 16 * 17 + 8
    assert record.summary.tokens_per_s and record.summary.tokens_per_s > 0
    assert open_record(tmp_path / "out").summary == record.summary


CELL = """
import torch, fsdplab
from torch.distributed.fsdp import fully_shard

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
recorder = fsdplab.Recorder({folder!r}, model, optimizer, steps="4:6", job="a cell")
"""
LOOP = """
for _ in range(10):
    loss = model(torch.randn(8, 64)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    recorder.step(loss=loss, tokens=8)
"""


@pytest.mark.parametrize("start", ["warm", "torchrun"])
def test_by_hand_in_cells_on_ranks_that_stay(start, tmp_path):
    """The loop goes on in a second cell, and the ranks live on after the recording."""
    ranks = StayingRanks.start(2, start)
    try:
        for cell in (CELL.format(folder=str(tmp_path / "out")), LOOP, LOOP):
            ranks.run(cell, None, time_limit=120.0, on_output=lambda *_: None)
        assert ranks.alive
    finally:
        ranks.stop()
    record = open_record(tmp_path / "out")
    assert (record.spec["engine"], record.spec["job"], record.spec["world_size"]) == ("torch-fsdp2", "a cell", 2)
    assert {row["step"] for row in record.table("breakdown")} == {4, 5} and record.summary.comm.bytes_per_step
    assert record.summary.peak_memory_bytes.split["optimizer_state"] and record.summary.tokens_per_s


class Container(torch.optim.Optimizer):
    """Steps several optimizers as one, as torchtitan's does; all state is theirs."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = list(optimizers)
        super().__init__([each for one in optimizers for each in one.param_groups[0]["params"]], {})

    def step(self) -> None:
        for each in self.optimizers:
            each.step()


def test_by_hand_the_state_of_a_container_of_optimizers_is_found(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    optimizer = Container(*(torch.optim.AdamW(each.parameters(), fused=True) for each in model))
    loop(Recorder(tmp_path / "out", model, optimizer, steps="4:5"), model, optimizer, 20)
    assert open_record(tmp_path / "out").summary.peak_memory_bytes.split["optimizer_state"] == 4 * (4 * 16 * 17 + 4)


def test_by_hand_a_folder_that_cannot_be_had_is_said_and_the_loop_goes_on(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters())
    assert len(loop(Recorder(tmp_path, model, optimizer), model, optimizer, 3)) == 3
    assert "holds other files (notes.txt)" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


# ---- parts


# ---- the page


@pytest.mark.timeout(400)
def test_every_command_of_the_page_runs(tmp_path):
    """docs/your_training_job.md, followed in a folder with the jobs and nothing else."""
    page = (ROOT / "docs" / "your_training_job.md").read_text(encoding="utf-8")
    program = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(program) == 1 and program[0].startswith("# by_hand.py")
    (tmp_path / "by_hand.py").write_text(program[0])
    for job in ("fsdp2_loop.py", "plain.py"):
        shutil.copy(JOBS / job, tmp_path)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    commands = re.findall(r"^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    lines = [line for block in commands for line in block.splitlines()]
    assert len(lines) == 5
    for line in lines:
        here = line.replace("fsdplab ", f"{sys.executable} -m fsdplab ", 1) if line.startswith("fsdplab") else line
        done = subprocess.run(
            here, shell=True, cwd=tmp_path, env=environment(PATH=path), capture_output=True, text=True
        )
        assert done.returncode == 0, (line, done.stdout[-2000:], done.stderr[-2000:])
    assert "Where a step of fsdp2_loop.py goes" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert {row["step"] for row in RunRecord.load(tmp_path / "early").table("breakdown")} == {4, 5}
    assert RunRecord.load(tmp_path / "by-hand").summary.tokens_per_s


@pytest.mark.quick
def test_the_round_of_optimizers_is_known_once_one_steps_again():
    around = Round()
    assert [around.is_first_of(each) for each in "abab"] == [True, True, False, False]
    assert around.optimizers == ["a", "b"]


@pytest.mark.quick
def test_the_environment_for_other_nodes_is_printed_and_nothing_is_written(tmp_path):
    done = run("-m", "fsdplab", "record", "--out", "there", "--print-env", "--", "python", "my.py", cwd=tmp_path)
    lines = dict(line.removeprefix("export ").split("=", 1) for line in done.stdout.splitlines())
    assert done.returncode == 0 and not any(tmp_path.iterdir()), done.stderr
    assert Settings.read(lines["FSDPLAB_RECORD"].strip("'")).job == "my.py"
    assert lines["PYTHONPATH"].startswith(str(BOOTSTRAP))


@pytest.mark.quick
def test_which_ranks_are_measured():
    usual = Settings("out")
    assert usual.measures(15, 16, 8) and usual.measures(7, 64, 8) and not usual.measures(8, 64, 8)
    assert Settings("out", ranks=(9,)).measures(9, 64, 8) and not Settings("out", ranks=(9,)).measures(0, 64, 8)
    assert Settings.read(Settings("out", ranks=(1, 2)).as_text()) == Settings("out", ranks=(1, 2))


@pytest.mark.quick
@pytest.mark.parametrize("warmup", [0, 1])
def test_a_step_is_between_the_memory_and_the_trace(warmup):
    """The range that torch opens around compiled code, in which a step may end, has to end between two profilers."""
    settings = Settings("out", 4, 6)
    assert 0 < settings.memory_step(warmup) < settings.first - warmup - 1


@pytest.mark.quick
@pytest.mark.parametrize("text", ["10", "a:b", "12:10", "1:4", "3:5", ""])
def test_steps_that_cannot_be_recorded_are_refused(text):
    with pytest.raises(RecordingError, match="FIRST:END"):
        Settings("out", *steps_of(text))


@pytest.mark.quick
def test_a_folder_without_a_step_says_so(tmp_path):
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "spec.json").write_text(Settings(str(tmp_path)).as_text())
    with pytest.raises(NothingRecorded, match="no rank took an optimizer step"):
        open_record(tmp_path)


@pytest.mark.quick
def test_remedies_are_said_in_the_jobs_own_words():
    """Every word has a general one, and a run of the lab keeps the lab's."""
    for own in (*_BY_ENGINE.values(), *_BY_TRAINER.values(), *_OF_AN_ENGINE.values()):
        assert own.keys() <= _LAB.keys()
    assert words_of({"engine": "torch-fsdp2"}) == _LAB
    assert words_of({"job": "a.py", "engine": "torch-fsdp2"})["gather_ahead"].startswith(
        "Gather a unit ahead: blocks[i]"
    )
    # parameters in bf16 would lose small updates, which is a fault of its own
    for engine in ("torch-ddp", "torch-fsdp1", "torch-fsdp2"):
        in_bf16 = words_of({"job": "a.py", "engine": engine, "trainer": "Lightning"})["low_precision"]
        assert "bf16-true" not in in_bf16 and ("bf16_compress_hook" in in_bf16 or "param_dtype" in in_bf16)
    told = words_of({"job": "a.py", "engine": "torch-ddp", "trainer": "Trainer"})
    assert told["low_precision"] == "TrainingArguments(bf16=True)" and "ZeroRedundancy" not in told["shard_state"]
    assert json.loads("{" + words_of({"job": "a.py", "engine": "deepspeed-3"})["offload_state"] + "}")


@pytest.mark.quick
def test_what_every_python_of_a_job_runs_imports_neither_torch_nor_fsdplab(tmp_path):
    done = run("-c", "import sys; print('torch' in sys.modules, 'fsdplab' in sys.modules)", cwd=tmp_path,
               PYTHONPATH=str(BOOTSTRAP))  # fmt: skip
    assert done.stdout.split() == ["False", "False"], done.stderr
