"""A worker whose rank 1 computes for longer than it should: `python slow_worker.py FOLDER`."""

from __future__ import annotations

import sys

import steady_worker  # beside this script

if __name__ == "__main__":
    steady_worker.main(*sys.argv[1:], times=lambda rank: 1.6 if rank == 1 else 1.0)
