"""Sessions without ranks: invalid requests fail in one line, and the data of a failed run becomes one report."""

from __future__ import annotations

import getpass
import json
import re
import socket
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdplab.common.places import how_to_install
from fsdplab.planning.lab_memory import unit_parameters
from fsdplab.records.spread import step_seconds
from fsdplab.records.summary import Comm
from fsdplab.sessions import ENGINES, RanksFailed, RunSpec, SpecError, bench, compare
from fsdplab.sessions.formula import formula_bytes, lab_run, traffic_of
from fsdplab.sessions.launch.failure_report import Note, PostMortem, failed_first, hung, not_started, too_slow
from fsdplab.sessions.launch.launcher import RankActivity
from fsdplab.sessions.launch.mailbox import (
    Heartbeat,
    HeartbeatWriter,
    Mailbox,
    read_heartbeat,
    read_heartbeats,
    read_lines,
)
from fsdplab.sessions.launch.stacks import of_exception, readable
from fsdplab.sessions.remote_call import unsupported_type
from fsdplab.sessions.summary import mean_losses, sent_per_step
from fsdplab.sessions.worker.environment import capture_environment
from fsdplab.workloads import build_model

pytestmark = pytest.mark.quick


# ---- RunSpec


def test_a_spec_survives_the_way_through_json() -> None:
    spec = RunSpec(strategy="zero1", card=10**9, micro_batches=2)
    assert RunSpec(**json.loads(json.dumps(spec.as_dict()))) == spec
    assert (spec.total_steps, spec.processes, spec.tokens_per_rank) == (6, 2, 256)
    assert RunSpec(engine="twin", world_size=3).processes == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strategy": "fullshard"}, r"unknown strategy 'fullshard' \(did you mean full_shard"),
        ({"strategy": "FULL-SHARD"}, "did you mean full_shard"),
        ({"strategy": "zero-3"}, "ZeRO-3 is full_shard here"),
        ({"strategy": 3}, "unknown strategy 3; expected one of no_shard, zero1"),
        ({"engine": "fsdp2"}, r"unknown engine 'fsdp2' \(did you mean torch-fsdp2"),
        ({"precision": "fp16"}, "expected one of fp32, bf16"),
        ({"device": "tpu"}, "expected one of auto, cpu, cuda"),
        ({"optimizer": "sgd"}, "expected one of adamw"),
        ({"units": "layers"}, "expected one of auto"),
        ({"memory": "yes"}, "expected one of True, False"),
        ({"world_size": 0}, "world_size is 0; expected a whole number of at least 1"),
        ({"world_size": 2.0}, "world_size is 2.0"),
        ({"world_size": True}, "world_size is True"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"sequence_length": -1}, "sequence_length is -1"),
        ({"steps": 0}, "steps is 0"),
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"warmup": -1}, "warmup is -1"),
        ({"warmup": 1}, "give warmup=2 or more, or memory=False"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"seed": "lucky"}, "seed is 'lucky'"),
        ({"card": 0}, "card is 0; expected a whole number of at least 1 .bytes"),
        ({"card": "300MB"}, "card is '300MB'"),
        ({"card": 10**9, "memory": False}, "leave memory=True"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; expected a number above 0"),
        ({"time_limit": float("inf")}, "time_limit is inf"),
        ({"sequence_length": 257}, "longer than the model's context of 256"),
        ({"model": "gpt-20"}, "unknown model 'gpt-20': did you mean gpt-20m"),
        ({"model": "mine.py"}, "there is no file mine.py; expected a Python file with"),
        ({"text": "/nowhere/at/all.txt"}, "does not exist"),
        ({"engine": "torch-ddp"}, "engine torch-ddp cannot do full_shard; expected no_shard"),
        ({"engine": "torch-fsdp2", "strategy": "zero2"}, "expected full_shard or shard_grad_op"),
        ({"engine": "torch-fsdp2", "prefetch": 2}, "leave prefetch=1, or give engine='lab'"),
        ({"engine": "torch-fsdp2", "transport": "gloo"}, "brings its own; leave transport='auto'"),
        (
            {"engine": "twin", "transport": "shm"},
            "give torch-ddp or torch-fsdp1 or torch-fsdp2 for shm, or engine='lab'",
        ),
        ({"transport": "nccl"}, "transport nccl does not move tensors on cpu"),
        ({"model": "llama-3.1-405b"}, "GB of memory, but this machine has"),
        ({"world_size": 100_000}, "fewer ranks"),
    ],
)
def test_a_run_that_cannot_be_is_refused_in_one_line(fields: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        RunSpec(**{"device": "cpu", **fields})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_torchs_engines_run_on_shared_memory_where_it_is_asked_for() -> None:
    for engine in ("torch-ddp", "torch-fsdp1", "torch-fsdp2"):
        fields = {"engine": engine, "strategy": ENGINES[engine][0], "device": "cpu"}
        assert [RunSpec(**fields, transport=transport).backend for transport in ("auto", "shm")] == ["gloo", "shm"]
    assert RunSpec(transport="shm", device="cpu").backend == "gloo"  # the lab's engine chooses on top of it
    with pytest.raises(SpecError, match="share one process group"):
        bench([RunSpec(engine="torch-fsdp2", device="cpu", transport=transport) for transport in ("auto", "shm")])


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(SpecError, match="too short"):
        RunSpec(text=str(tmp_path / "short.txt"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_more_ranks_than_gpus_are_refused() -> None:
    assert RunSpec(device="auto").device_type == "cpu"
    with pytest.raises(SpecError, match="no GPU can be used.*device='cpu'"):
        RunSpec(device="cuda")


def test_deepspeed_that_is_not_installed_comes_with_the_command() -> None:
    if __import__("importlib.util").util.find_spec("deepspeed"):
        pytest.skip("deepspeed is installed here")
    for engine in ("deepspeed-1", "deepspeed-2", "deepspeed-3"):
        with pytest.raises(SpecError, match=re.escape(how_to_install("peers"))):
            RunSpec(engine=engine, strategy=ENGINES[engine][0])


def test_runs_of_different_models_are_not_compared() -> None:
    with pytest.raises(SpecError, match="seed is 0 and 1"):
        compare([RunSpec(seed=0), RunSpec(seed=1)])
    with pytest.raises(SpecError, match="engines of a bench must train the same thing, but seed is 0 and 1; give all"):
        bench([RunSpec(seed=0), RunSpec(seed=1, strategy="zero1", prefetch=0)])
    with pytest.raises(SpecError, match="nothing to compare"):
        compare([])


# ---- the report of a failed run


def note(error: str, time: float = 1.0, kind: str = "raised") -> Note:
    return Note(kind, error, "Traceback ...", time, heartbeat(0))


def heartbeat(rank: int, step: int = 3, phases: int = 10, collectives: int = 5, phase: str = "backward") -> Heartbeat:
    return Heartbeat(rank, 1000 + rank, step, phase, phases, collectives, "all_reduce of 8 bytes")


CLOSED = note("RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1", time=0.5)
HEARTBEATS = {0: heartbeat(0), 1: heartbeat(1)}


@pytest.mark.parametrize(
    ("exits", "notes", "kind", "rank"),
    [
        ({1: -9}, {0: CLOSED}, "died", 1),
        ({0: 1, 1: -9}, {0: note("KeyError: 'blocks.0'")}, "died", 1),
        ({0: -15, 1: 1}, {1: note("ValueError: no")}, "raised", 1),
        ({0: 1, 1: 1}, {0: CLOSED, 1: note("ValueError: no", time=2.0)}, "raised", 1),
        ({0: 1, 1: 1}, {0: note("ValueError: late", time=2.0), 1: note("ValueError: early", time=1.0)}, "raised", 1),
        ({0: -6, 1: 1}, {1: note("ValueError: no")}, "raised", 1),
        ({0: 1, 1: -15}, {0: CLOSED}, "raised", 0),
        ({0: -15, 1: 3}, {}, "died", 1),
        ({0: 1}, {0: CLOSED}, "died", 1),  # rank 1 ended with exit code 0, which nobody reports
        (
            {0: 1, 1: 3},
            {0: note("RuntimeError: rank 0 waited for rank 1 to write operation 16, but rank 1 has died")},
            "died",
            1,
        ),
        ({0: 1}, {0: note("Diverged: the loss is nan", kind="diverged")}, "diverged", 0),
    ],
)
def test_the_first_to_fail_is_blamed_not_those_that_follow(exits: dict, notes: dict, kind: str, rank: int) -> None:
    report = failed_first(PostMortem(exits, notes, HEARTBEATS))
    assert (report.kind, report.rank, report.step, report.phase) == (kind, rank, 3, "backward")
    assert report.collective == "all_reduce of 8 bytes"
    assert f"Rank {rank}" in report.message and "step 3" in report.message


def test_a_rank_that_could_not_start_is_reported_with_what_was_printed() -> None:
    report = failed_first(PostMortem({0: 1}, printed="ModuleNotFoundError: No module named 'torch'"))
    assert report.rank == 0 and "before it could start" in report.message and "ModuleNotFoundError" in report.message


WAITING = '  File "/x/torch/distributed/distributed_c10d.py", line 1, in all_reduce\n    work.wait()'
SLEEPING = '  File "/x/my_fsdp.py", line 7, in shard\n    time.sleep(100)'


@pytest.mark.parametrize(
    ("heartbeats", "stacks", "rank"),
    [
        ({0: heartbeat(0, phases=11), 1: heartbeat(1)}, {}, 1),  # the others are a phase further
        ({0: heartbeat(0, collectives=6), 1: heartbeat(1)}, {}, 1),  # or a collective
        ({0: heartbeat(0), 1: heartbeat(1)}, {0: WAITING, 1: SLEEPING}, 1),  # or alone outside one
        ({0: heartbeat(0), 1: heartbeat(1)}, {0: WAITING, 1: WAITING}, None),
    ],
)
def test_the_rank_that_the_others_wait_for_is_blamed_for_a_hang(
    heartbeats: dict, stacks: dict, rank: int | None
) -> None:
    report = hung(PostMortem(heartbeats=heartbeats, stacks=stacks), 12.0)
    assert (report.kind, report.rank) == ("hung", rank)


def test_a_rank_that_never_started_is_named() -> None:
    report = not_started(PostMortem(heartbeats={0: heartbeat(0)}), 9.0, 2)
    assert (report.kind, report.rank) == (
        "timeout",
        1,
    ) and "Rank 1 did not start within the time limit of 9 s" in report.message


def test_a_run_that_still_moved_at_its_time_limit_was_slow() -> None:
    report = too_slow(PostMortem(heartbeats={0: heartbeat(0, step=5, phases=20), 1: heartbeat(1, step=4)}), 60.0)
    assert report.kind == "timeout" and "60 s" in report.message and "step 4" in report.message


def test_the_report_is_the_text_of_the_error() -> None:
    report = failed_first(PostMortem({1: 1}, {1: note("ValueError: no")}, HEARTBEATS))
    error = RanksFailed(report)
    assert str(error).startswith("Rank 1 raised in step 3 (backward): ValueError: no.") and str(error).endswith(
        "Traceback ..."
    )
    assert json.loads(json.dumps(report.as_dict()))["kind"] == "raised"


def test_a_stall_is_a_pause_much_longer_than_any_before() -> None:
    progress = RankActivity()
    progress.look({0: heartbeat(0), 1: heartbeat(1)})
    assert not progress.stalled(2) and progress.moving
    progress.last -= 19.0
    assert not progress.stalled(2)
    progress.last -= 2.0
    assert progress.stalled(2) and not progress.moving and not progress.stalled(3)
    progress.longest_pause = 5.0
    assert not progress.stalled(2)
    progress.heartbeats = {0: heartbeat(0), 1: heartbeat(1, step=0)}
    progress.longest_pause = 0.0
    assert not progress.stalled(2), "a first step may take long"


# ---- mailbox, stacks, values, summary, environment


def test_a_heartbeat_is_read_as_written_and_a_torn_one_is_none(tmp_path: Path) -> None:
    mailbox = Mailbox(tmp_path)
    writer = HeartbeatWriter(mailbox.of(0, "heartbeat"), 0)
    writer.enter("forward", 7)
    writer.issue("all_gather of 64 bytes")
    writer.enter("backward")
    assert read_heartbeats(mailbox, 2) == {0: writer.last()}
    assert (writer.last().step, writer.last().phases, writer.last().collectives) == (7, 2, 1)
    mailbox.of(1, "heartbeat").write_text('{"rank": 1, "pi')
    assert read_heartbeat(mailbox.of(1, "heartbeat")) is None


def test_half_of_a_heartbeat_and_half_of_the_next_are_neither(tmp_path: Path) -> None:
    """A look between two bytes of a write: much of what could be seen is JSON, of a step or a process that is none."""
    file = tmp_path / "rank0.heartbeat"
    writer = HeartbeatWriter(file, 0)
    written = []
    for step, collective in ((9, "all_reduce of 64 bytes"), (10, "all_reduce of 1024 bytes")):
        writer.enter("forward", step)
        writer.issue(collective)
        written.append((writer.last(), file.read_bytes()))
    (before, old), (after, new) = written
    for cut in range(len(old) + 1):
        file.write_bytes(new[:cut] + old[cut:])
        assert read_heartbeat(file) in (None, before, after), cut


def test_a_heartbeat_longer_than_usual_leaves_nothing_behind(tmp_path: Path) -> None:
    writer = HeartbeatWriter(tmp_path / "rank0.heartbeat", 0)
    for collective in ("\u00fc" * 200, "all_reduce of 64 bytes"):
        writer.issue(collective)
        assert read_heartbeat(tmp_path / "rank0.heartbeat") == writer.last()


def test_a_line_that_is_still_being_written_waits(tmp_path: Path) -> None:
    (tmp_path / "steps").write_text('{"step": 0}\n{"step"')
    assert read_lines(tmp_path / "steps") == [{"step": 0}]
    assert read_lines(tmp_path / "nothing") == []


def test_a_dump_is_cut_to_the_main_thread_and_gets_its_source_lines() -> None:
    here = Path(__file__)
    dump = f"""Thread 0x1 (most recent call first):
  File "/usr/lib/python3/threading.py", line 9 in wait

Current thread 0x2 (most recent call first):
  File "/x/fsdplab/sessions/worker/collective_hooks.py", line 55 in announced
  File "{here}", line 1 in shard
  File "<frozen runpy>", line 88 in _run_code
"""
    assert readable(dump) == f'  File "{here}", line 1, in shard\n    {here.read_text().splitlines()[0]}'
    assert readable("") == ""


def test_a_traceback_keeps_its_causes() -> None:
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ValueError("outer") from inner
    except ValueError as error:
        told = of_exception(error)
    assert "KeyError: 'inner'" in told and told.rstrip().endswith("ValueError: outer")


def test_only_plain_values_travel() -> None:
    plain = {"a": [1, 2.0, None, True, "x", torch.ones(2), (torch.nn.Parameter(torch.ones(1)),)], 3: {}}
    assert unsupported_type(plain) is None
    assert unsupported_type([{"a": (set(),)}]) == "set"
    assert unsupported_type({torch.float32: 1}) == "dtype"


def test_a_step_is_as_slow_as_its_slowest_rank_and_its_loss_is_the_mean() -> None:
    nan = float("nan")
    cells = [
        (0, 0, 4.0, None),
        (1, 0, 6.0, None),
        (0, 1, 3.0, 0.5),
        (1, 1, 4.0, 0.7),
        (0, 2, nan, 0.6),
        (1, 2, 4.0, 0.4),
    ]
    rows = [dict(zip(("rank", "step", "loss", "step_time_s"), cell)) for cell in cells]
    assert step_seconds(rows) == [0.7, 0.6]
    assert mean_losses(rows) == (5.0, 3.5, None)
    assert mean_losses(rows[:3]) == (5.0,), "a step that only some ranks finished has no mean"


def test_bytes_sent_are_those_of_the_last_step_of_one_rank() -> None:
    ledger = [
        {"rank": rank, "step": step, "wire_bytes": 10 * (step + 1)}
        for rank in (0, 1)
        for step in (0, 1)
        for _ in range(3)
    ]
    assert sent_per_step(RunSpec(), ledger) == Comm(bytes_per_step=60, collectives_per_step=3)
    assert sent_per_step(RunSpec(engine="torch-fsdp2"), []) == Comm()


def test_the_formula_is_the_textbooks() -> None:
    spec = RunSpec(model="gpt-tiny", strategy="no_shard", world_size=2)
    assert [row.unit for row in traffic_of(spec, "no_shard")] == ["root", "blocks.0", "blocks.1"]
    parameters = sum(parameter.numel() for parameter in build_model("gpt-tiny", device="meta").parameters())
    assert formula_bytes(spec) == 2 * 4 * parameters // 2
    assert formula_bytes(replace(spec, engine="twin")) is None
    assert formula_bytes(replace(spec, world_size=1)) == 0


@pytest.mark.parametrize("kind", ["block", "linear", "model"])
@pytest.mark.parametrize("name", ["gpt-tiny", "gpt-20m", "llama-tiny", "llama-20m", "gpt2"])
def test_the_formulas_units_are_those_of_the_model_that_is_built(name: str, kind: str) -> None:
    model = build_model(name, device="meta")
    linears = [path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    built: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for path, parameter in model.named_parameters():
        owner, parts = path.rpartition(".")[0], path.split(".")
        of_block = ".".join(parts[:2]) if parts[0] == "blocks" else "root"
        unit = {"block": of_block, "linear": owner if owner in linears else "root", "model": "root"}[kind]
        built[unit].append(tuple(parameter.shape))
    planned = unit_parameters(lab_run(RunSpec(model=name, units=kind, device="cpu")))
    told = [sorted(each.shape for each in own) for own in planned.values()]
    assert sorted(told) == sorted(map(sorted, built.values())) and next(iter(planned)) == "root"
    assert sorted(each.shape for each in planned["root"]) == sorted(built["root"])


def test_the_environment_tells_the_machine_but_not_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_TOPO_FILE", str(Path.home() / "topology.xml"))
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    environment = capture_environment("cpu")
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["device"] == "cpu" and environment["gpus"] == [] and environment["backend"] == "gloo"
    assert environment["variables"]["NCCL_DEBUG"] == "WARN" and environment["variables"]["NCCL_TOPO_FILE"] == "(a path)"
    text = json.dumps(environment)
    for private in (socket.gethostname(), str(Path.home()), getpass.getuser()):
        assert len(private) < 4 or private not in text
