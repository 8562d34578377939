"""The stand-in does what CUDA does in the respects that the rehearsal relies on, and refuses what CUDA refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fake_cuda.machine import Done, Machine

Script = Callable[..., Done]
SLOW_COPIES = {"COPY_US": 200_000}


def test_a_copy_is_seen_after_its_event_and_not_before(script: Script) -> None:
    """The stream order is real: the same read without the wait sees the old bytes."""
    done = script(
        Machine(settings=SLOW_COPIES),
        """
        import torch
        source = torch.ones(4, pin_memory=True)
        target = torch.zeros(4, pin_memory=True)
        gpu, side = torch.zeros(4).cuda(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            gpu.copy_(source, non_blocking=True)
            target.copy_(gpu, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        print(target.tolist())
        arrived.synchronize()
        print(target.tolist())
        """,
    )
    assert done.output.splitlines() == ["[0.0, 0.0, 0.0, 0.0]", "[1.0, 1.0, 1.0, 1.0]"]


def test_the_allocator_counts_and_a_full_gpu_is_out_of_memory(script: Script) -> None:
    done = script(
        Machine(memory_gb=15),
        """
        import torch
        free, total = torch.cuda.mem_get_info()
        print(torch.cuda.get_device_name(), total >> 30, free < total)
        torch.empty(16 << 30, dtype=torch.uint8, device="cuda")
        """,
    )
    assert done.returncode == 1
    assert "NVIDIA H100 80GB HBM3 15 True" in done.output
    assert "torch.OutOfMemoryError: CUDA out of memory" in done.output


def test_a_child_that_is_forked_after_the_first_call_cannot_use_cuda(script: Script) -> None:
    done = script(
        Machine(),
        """
        import os, torch
        torch.ones(1).cuda()
        if os.fork() == 0:
            try:
                torch.ones(1).cuda()
            except RuntimeError as error:
                print(error)
            os._exit(0)
        os.wait()
        """,
    )
    assert "Cannot re-initialize CUDA in forked subprocess" in done.output


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (Machine(capability=70), "no kernel image is available"),
        (Machine(settings={"DRIVER": 11040}), "driver on your system is too old"),
        (Machine(gpus=0), "No CUDA GPUs are available"),
    ],
    ids=["capability", "driver", "none"],
)
def test_a_machine_that_cannot_run_the_wheel_says_so(script: Script, machine: Machine, words: str) -> None:
    done = script(machine, "import torch; torch.zeros(3, device='cuda').add_(1)")
    assert done.returncode == 1
    assert words in done.output


def test_an_exclusive_gpu_takes_one_process(script: Script) -> None:
    second = (
        "import subprocess, sys, torch; torch.ones(1).cuda(); "
        "subprocess.run([sys.executable, '-c', 'import torch; torch.ones(1).cuda()'])"
    )
    assert "busy or unavailable" in script(Machine(settings={"COMPUTE_MODE": "exclusive"}), second).output
    assert "busy or unavailable" not in script(Machine(), second).output


def test_memory_of_a_process_that_has_ended_is_free_before_it_is_collected(script: Script) -> None:
    done = script(
        Machine(memory_gb=15),
        """
        import os, subprocess, sys
        import torch
        taken = "import torch; torch.empty(10 << 30, dtype=torch.uint8, device='cuda'); print('taken')"
        child = subprocess.Popen([sys.executable, "-c", taken])
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        print("free", torch.cuda.mem_get_info()[0] >> 30)
        """,
    )
    assert "taken" in done.output and "free 14" in done.output, done.output


@pytest.mark.parametrize("settings", [{}, {"IPC": "refused"}], ids=["allowed", "refused"])
def test_another_process_opens_memory_unless_ipc_is_refused(script: Script, settings: dict[str, str]) -> None:
    done = script(
        Machine(settings=settings),
        """
        import torch
        from torch.multiprocessing.reductions import reduce_tensor
        import torch.multiprocessing as mp
        import sys, types

        def child(queue):
            queue.get()[:] = torch.full((4,), 7.0)
            torch.cuda.synchronize()

        if __name__ == "__main__":
            context = mp.get_context("fork")
            queue = context.SimpleQueue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            tensor = torch.zeros(4).cuda()
            queue.put(tensor)
            process.join()
            print(tensor.tolist())
        """,
    )
    if settings:
        assert "operation not supported" in done.output
    else:
        assert "[7.0, 7.0, 7.0, 7.0]" in done.output


COLLECTIVES = """
n = dist.get_world_size()
def show(name, tensor):
    torch.cuda.synchronize()
    print(f"of {rank}:", name, tensor.tolist())
for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
    t = torch.tensor([rank + 1, 10 * rank], dtype=dtype).cuda()
    dist.all_reduce(t)
    show(str(dtype), t)
for op in ("AVG", "MAX", "MIN"):
    t = torch.tensor([rank + 1.0]).cuda()
    dist.all_reduce(t, op=getattr(dist.ReduceOp, op))
    show(op, t)
gathered = torch.empty(n).cuda()
dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]).cuda())
show("gather", gathered)
part = torch.empty(1).cuda()
dist.reduce_scatter_tensor(part, torch.tensor([rank + 10.0 * i for i in range(n)]).cuda())
show("scatter", part)
t = torch.tensor([rank + 1.0]).cuda()
dist.broadcast(t, 1)
show("broadcast", t)
received, sent = torch.empty(1).cuda(), torch.tensor([float(rank)]).cuda()
both = [dist.P2POp(dist.isend, sent, (rank + 1) % n), dist.P2POp(dist.irecv, received, (rank - 1) % n)]
[work.wait() for work in dist.batch_isend_irecv(both)]
show("neighbour", received)
half = dist.new_group([0, 1] if rank < 2 else [2, 3], use_local_synchronization=True)
t = torch.tensor([rank + 1.0]).cuda()
dist.all_reduce(t, group=half)
show("half", t)
"""


def test_collectives_of_four_processes_give_real_results(script: Script) -> None:
    done = script(Machine(gpus=4), COLLECTIVES, ranks=4)
    assert [line for line in done.output.splitlines() if line.startswith("of 3: ")] == [
        f"of 3: {line}"
        for line in (
            "torch.float32 [10.0, 60.0]", "torch.bfloat16 [10.0, 60.0]", "torch.float64 [10.0, 60.0]",
            "torch.int64 [10, 60]", "AVG [2.5]", "MAX [4.0]", "MIN [1.0]", "gather [0.0, 1.0, 2.0, 3.0]",
            "scatter [126.0]", "broadcast [2.0]", "neighbour [2.0]", "half [7.0]",
        )
    ]  # fmt: skip


def test_nccl_refuses_two_ranks_on_one_gpu_unless_its_version_and_environment_allow_it(script: Script) -> None:
    source = "dist.all_reduce(torch.ones(1).cuda()); torch.cuda.synchronize(); print('reduced')"
    refused = script(Machine(), source, ranks=2)
    assert "Duplicate GPU detected" in refused.output
    allow = "os.environ['NCCL_MULTI_RANK_GPU_ENABLE'] = '1'\n"
    assert script(Machine(settings={"NCCL": 23007}), allow + source, ranks=2).output.count("reduced") == 2
    assert "Duplicate GPU" in script(Machine(settings={"NCCL": 22907}), allow + source, ranks=2).output


def test_ranks_that_issue_different_collectives_are_told(script: Script) -> None:
    source = "t = torch.ones(2 + rank).cuda()\ndist.all_reduce(t)\ntorch.cuda.synchronize()\nos._exit(0)"
    assert "issued different collectives as their number 1" in script(Machine(gpus=2), source, ranks=2).output
