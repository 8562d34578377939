"""`fsdplab record` of a job on two nodes, which are network namespaces: into a folder that both see, and into two."""

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
from fsdplab.sessions.virtual_nodes import why_no_nodes
from tests.one_node import Switch, address, enter_new_network, node_command
from tests.test_recording import JOBS, environment, run

WHY_NOT = why_no_nodes() or (None if os.geteuid() == 0 else "only root connects namespaces of other processes")
needs_nodes = pytest.mark.skipif(WHY_NOT is not None, reason=f"this system has no nodes: {WHY_NOT}")
PATIENCE_S = 240
RATE = 50e6


def torchrun(node: int) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node),
        "--nproc-per-node", "1", "--master-addr", address(0), "--master-port", "29500",
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
    """The nodes' words with their variables, each in a namespace, run to their ends; what they print."""
    switch, started = Switch(RATE), []
    try:
        for number, (words, more) in enumerate(nodes):
            started.append(
                subprocess.Popen(
                    node_command(number, RATE, words),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    cwd=folder,
                    preexec_fn=enter_new_network,
                    env=environment(GLOO_SOCKET_IFNAME="cable", **{**more, "PYTHONPATH": _path(more)}),
                )  # fmt: skip
            )
            switch.plug(number, started[-1])
        printed = [each.communicate(timeout=PATIENCE_S)[0] for each in started]
    finally:
        for each in started:
            each.kill()
        switch.close()
    assert [each.returncode for each in started] == [0, 0], "\n".join(printed)[-4000:]
    return printed


def _path(more: dict[str, str]) -> str:
    return os.pathsep.join(filter(None, [more.get("PYTHONPATH"), environment()["PYTHONPATH"]]))


def is_of_both(found: RunRecord) -> None:
    assert found.status == "finished" and found.spec["world_size"] == 2 and found.spec["engine"] == "torch-fsdp2"
    for name in ("steps", "memory", "breakdown"):
        assert {row["rank"] for row in found.table(name)} == {0, 1}, name
    assert len(found.summary.losses) == 26 and found.summary.comm.bytes_per_step
    assert not any("left nothing" in note for note in found.summary.notes)


@needs_nodes
@pytest.mark.timeout(400)
def test_into_a_folder_that_both_nodes_see(tmp_path: Path) -> None:
    """`fsdplab record` on the first node waits for the other's ranks, and the record is of both."""
    out = tmp_path / "out"
    ended(tmp_path, (record(out, "--", *torchrun(0)), {}), (torchrun(1), variables(out, tmp_path)))
    is_of_both(RunRecord.load(out))


@needs_nodes
@pytest.mark.full("two nodes again, with folders of their own")
@pytest.mark.timeout(400)
def test_into_a_folder_of_each_node_brought_together_afterwards(tmp_path: Path) -> None:
    """No folder is shared: every node has the variables, and the folders' files are copied into one."""
    folders = [tmp_path / "first", tmp_path / "second"]
    ended(tmp_path, *((torchrun(node), variables(out, tmp_path)) for node, out in enumerate(folders)))
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
