"""`fsdplab record` of a job on two nodes, a torchrun each: into a folder that both see, and into two."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdplab import open_record
from fsdplab.recording.launch import prepare
from fsdplab.recording.settings import Settings
from fsdplab.records import RunRecord
from tests.forking_starter import _free_port
from tests.test_recording import JOBS, environment, run

PATIENCE_S = 240


def torchrun(node: int, port: int) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node),
        "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port),
        str(JOBS / "fsdp2_loop.py"), "--steps", "24",
    ]  # fmt: skip


def record(out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "fsdplab", "record", "-q", "--out", str(out), *more]


def variables(out: Path, folder: Path) -> dict[str, str]:
    """What `eval "$(fsdplab record --print-env ...)"` sets on a node."""
    printed = run(*record(out, "--print-env", "--", "fsdp2_loop.py")[1:], cwd=folder).stdout
    lines = [line.removeprefix("export ").partition("=") for line in printed.splitlines()]
    return {name: shlex.split(value)[0] for name, _, value in lines}


def ended(folder: Path, *nodes: tuple[list[str], dict[str, str]]) -> list[str]:
    """The nodes' words with their variables, run to their ends; what they print."""
    started = []
    try:
        for words, more in nodes:
            variables = environment(**{**more, "PYTHONPATH": _path(more)})
            started.append(
                subprocess.Popen(
                    words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, env=variables
                )
            )
        printed = [each.communicate(timeout=PATIENCE_S)[0] for each in started]
    finally:
        for each in started:
            each.kill()
    assert [each.returncode for each in started] == [0, 0], "\n".join(printed)[-4000:]
    return printed


def _path(more: dict[str, str]) -> str:
    return os.pathsep.join(filter(None, [more.get("PYTHONPATH"), environment()["PYTHONPATH"]]))


def is_of_both(found: RunRecord) -> None:
    assert found.status == "finished" and found.spec["world_size"] == 2 and found.spec["engine"] == "torch-fsdp2"
    for name in ("steps", "memory", "breakdown"):
        assert {row["rank"] for row in found.table(name)} == {0, 1}, name
    assert len(found.summary.losses) == 24 and found.summary.comm.bytes_per_step
    assert not any("left nothing" in note for note in found.summary.notes)


@pytest.mark.timeout(400)
def test_into_a_folder_that_both_nodes_see(tmp_path: Path) -> None:
    """`fsdplab record` on the first node waits for the other's ranks, and the record is of both."""
    out, port = tmp_path / "out", _free_port()
    ended(tmp_path, (record(out, "--", *torchrun(0, port)), {}), (torchrun(1, port), variables(out, tmp_path)))
    is_of_both(RunRecord.load(out))


@pytest.mark.full("two nodes again, with folders of their own")
@pytest.mark.timeout(400)
def test_into_a_folder_of_each_node_brought_together_afterwards(tmp_path: Path) -> None:
    """No folder is shared: every node has the variables, and the folders' files are copied into one."""
    folders, port = [tmp_path / "first", tmp_path / "second"], _free_port()
    ended(tmp_path, *((torchrun(node, port), variables(out, tmp_path)) for node, out in enumerate(folders)))
    assert [sorted(path.name for path in out.glob("ranks/*.steps")) for out in folders] == [
        ["rank0.steps"], ["rank1.steps"],
    ]  # fmt: skip
    shutil.copytree(folders[1], folders[0], dirs_exist_ok=True)
    is_of_both(open_record(folders[0]))


@pytest.mark.quick
def test_ranks_that_left_nothing_are_named(tmp_path: Path) -> None:
    """Of a job of four ranks this folder has the first node's two."""
    settings = Settings(str(tmp_path / "out"))
    prepare(settings)
    for rank in (0, 1):
        settings.mailbox.of(rank, "about").write_text('{"world_size": 4, "device": "cpu"}\n')
        settings.mailbox.of(rank, "steps").write_text("[0, 1.0, null, 8, 0.0]\n[1, 1.0, 0.1, 8, 0.0]\n")
    notes = open_record(tmp_path / "out").summary.notes
    assert (
        "ranks 2, 3 of 4 left nothing in this folder: give their nodes the environment of `fsdplab record --print-env`,"
        " and a folder that all nodes see, or copy what they left into this one before the record is made"
    ) in notes
