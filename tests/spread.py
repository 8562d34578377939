"""How `pytest -n 3` spreads tests over its workers: whole files, those that take longest first.

A file stays on one worker, whatever --dist says: a notebook's cells follow each other, and a module's runs are made
once. A long file that came last would keep one worker busy while the other one has nothing left.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

# Workers share the cores, and a thread of OpenMP would spin while it waits for one that has none: on a busy machine a
# small training took 30 times the processor's time. OpenMP reads this when torch is loaded, here and in kernels.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Files of more than 24 seconds, the longest first.
LONGEST = (
    "test_course_exercises", "test_recording", "test_without_linux", "test_warm_starts", "test_own_model_ranks",
    "07_overlap", "test_findings", "test_gpu_check", "test_course_20",
    "test_as_fresh", "test_example_elastic", "test_example_pretrain",
    "test_recorded_memory", "test_strategy_lab_browser", "test_engine_matrices", "test_example_finetune",
    "test_engine_state", "test_sessions_runs", "13_precision_checkpointing_offload", "test_course_11",
    "test_staying_ranks", "test_sessions_reports", "test_sessions_nodes", "test_compose_tensor", "test_sliders_browser",
    "11_strategy_shoot_out", "test_course_site", "test_sessions_call", "test_engine_numbers",
    "test_lab_browser", "09_memory_timelines", "test_prediction", "test_compose_experts",
    "test_course_09", "test_installed",
    "test_engine_shm_recovery", "test_step_program", "test_engine_offload", "test_surface_memory",
    "test_compose_pipeline", "test_teaching_course", "test_architecture", "test_cli", "test_plan_oracle",
    "test_surface_arguments",
    "12_hybrid_and_slow_links", "test_surface_training", "test_cli_ends", "04_zero_1_and_2_by_hand",
    "test_figures_profiled", "test_cli_fuzz", "test_surface_unused", "test_engine_checkpoint_files",
)  # fmt: skip


def pytest_report_header(config: pytest.Config) -> str | None:
    """That a whole run is not quite whole."""
    return "without the tests marked soak: `pytest -m soak` runs them" if _is_whole(config) else None


def _is_whole(config: pytest.Config) -> bool:
    """Whether nobody said which tests to run."""
    chosen = config.option.markexpr or config.option.keyword
    return not chosen and [Path(each).name for each in config.args] == config.getini("testpaths")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The order of LONGEST, then that of collection; the tests of a file keep theirs. A whole run has no soak tests."""
    if _is_whole(config):
        config.hook.pytest_deselected(items=[each for each in items if each.get_closest_marker("soak")])
        items[:] = [each for each in items if not each.get_closest_marker("soak")]
    place = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling:
    """Whole files in the order above."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)
