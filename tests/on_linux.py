"""Tests that ask for what only Linux on x86-64 has are skipped elsewhere, by the sentence with which it is refused."""

from __future__ import annotations

import platform
import sys
from collections.abc import Generator

import pytest

REFUSALS = {
    "transport 'shm' needs all ranks on one x86-64 Linux machine": "asks for shared memory, which Linux on x86-64 has",
    "start is 'warm', but ranks are forked on Linux only": "asks for forked ranks, which are for Linux",
    "The library Security failed to load": "a library that it imports loads what only a real macOS has",
}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    return (yield from _skipped_where_refused())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    return (yield from _skipped_where_refused())


def _skipped_where_refused() -> Generator[None, object, object]:
    try:
        return (yield)
    except Exception as error:
        if (sys.platform, platform.machine()) == ("linux", "x86_64"):
            raise
        found = next((asks for words, asks in REFUSALS.items() if words in str(error)), None)
        if found is None:
            raise
        pytest.skip(found)
