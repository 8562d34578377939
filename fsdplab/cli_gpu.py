"""`fsdplab gpu-check`: the flags are those of `python -m fsdplab.gpu_check`, which works without an install."""

from __future__ import annotations


def check_gpu(arguments: list[str]) -> int:
    """Run the check with these flags and return its exit status: 0 all passed, 1 something did not, 2 it cannot be, 130
    interrupted.
    """
    from fsdplab.gpu_check.__main__ import main

    return main(arguments)
