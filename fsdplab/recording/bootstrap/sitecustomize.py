"""Runs at the start of every Python of a recorded job, before the job's own code, since its folder is on PYTHONPATH.

It imports neither torch nor fsdplab: it waits until the job imports what takes steps, and has it hooked then
(recording/hooks.py). A sitecustomize of the user's own, which this one hides, runs as it would have run.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # every Python of the job runs this: what only annotations need is not imported
    from types import ModuleType
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(_HERE))
_WAITED_FOR = (
    "torch.optim.optimizer",
    "torch.utils.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor._api",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch._dynamo.callback",
    "deepspeed.runtime.engine",
    "fsdplab.engine.events",
)


class _Waiting:
    """Finds the modules that are waited for as Python would, and has each hooked after it has run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _WAITED_FOR:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                _hook_after(spec)
                return spec
        return None


def _hook_after(spec: Any) -> None:
    loader, run = spec.loader, spec.loader.exec_module

    def run_and_hook(module: ModuleType) -> None:
        # the loader's own method shows again below the attribute that hid it
        del loader.exec_module
        run(module)
        try:
            _package()
            from fsdplab.recording.hooks import hook

            hook(module)
        except Exception as error:  # whatever it is, the job must not fail of it
            print(f"fsdplab: this process is not recorded: {type(error).__name__}: {error}", file=sys.stderr)

    loader.exec_module = run_and_hook


def _package() -> None:
    """Make `import fsdplab` work where the job's Python has no fsdplab, without a further folder to import from."""
    if "fsdplab" in sys.modules or importlib.util.find_spec("fsdplab") is not None:
        return
    file = os.path.join(_PACKAGE, "__init__.py")
    spec: Any = importlib.util.spec_from_file_location("fsdplab", file, submodule_search_locations=[_PACKAGE])
    sys.modules["fsdplab"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["fsdplab"])


def _run_the_users() -> None:
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def _no_traceback_when_interrupted() -> None:
    """Print no traceback where a signal has ended this process: the launcher says once what was interrupted."""
    print_error = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        # torchrun raises the second one for a signal; torch is not imported here, so it is known by its name
        if not issubclass(kind, KeyboardInterrupt) and kind.__name__ != "SignalException":
            print_error(kind, error, traceback)

    sys.excepthook = hook


sys.meta_path.insert(0, _Waiting())
_no_traceback_when_interrupted()
# the job's own sitecustomize is the next one on the path
sys.path[:] = [each for each in sys.path if os.path.abspath(each) != _HERE]
_run_the_users()
