"""Finds what a `--model` names: a preset, a Python file, a Hugging Face folder, or a file with a notebook's workload.

Nothing here runs a user's code or imports torch: a request is checked, and a record says what was trained.
"""

from __future__ import annotations

import ast
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from fsdplab.common.files import read_file
from fsdplab.workloads.errors import ModelError
from fsdplab.workloads.shapes import SHAPES, preset

PRESET, FILE, HUGGING_FACE, VALUE = "preset", "file", "hugging face", "value"
CARRIED = ".workload"  # ends the name of a file with a workload of a notebook
NEEDED = ("model", "batch", "loss")
_LARGEST = 10**7  # bytes of a source
_HOW = "expected a Python file with model(), batch(at) and loss(model, batch)"


@dataclass(frozen=True)
class Source:
    """Where a model of one's own comes from: its kind, its file, and the name that tables show."""

    kind: str
    path: Path
    name: str

    @property
    def text(self) -> str:
        """Read what a record keeps: the file's own text, or the sources of a notebook's functions and classes."""
        path = self.path
        if self.kind == VALUE:
            path = path.with_suffix(".txt")
        return read_file(path, _LARGEST).decode(errors="replace")

    @property
    def digest(self) -> str:
        """Return sixteen hex digits that differ when the file does; modules that it imports have no part in them."""
        if self.kind == VALUE:
            # NAME-DIGEST.workload: the digest was made when the file was written
            return self.path.name.removesuffix(CARRIED).rpartition("-")[2]
        return hashlib.blake2b(read_file(self.path, 10**10), digest_size=8).hexdigest()


def is_own(model: str) -> bool:
    """Return whether `model` is a user's own, of which no shape is known; not a preset's name."""
    return kind_of(model) != PRESET


def reads_text(model: str) -> bool:
    """Return whether the model learns a run's text: a preset's or a Hugging Face model's batches are its tokens."""
    return is_of_tokens(kind_of(model))


def is_of_tokens(kind: str) -> bool:
    """Return whether batches of this kind of model are tokens of a text, as a run's settings size them."""
    return kind in (PRESET, HUGGING_FACE)


def kind_of(model: str) -> str:
    """Return what `model` names, by its spelling and by what is there; a name without suffix or slash is a preset."""
    if model.endswith(".py"):
        return FILE
    if model.endswith(CARRIED):
        return VALUE
    # before any look at the disk: no folder called gpt2 takes the place of the preset
    if "\0" in model or model in SHAPES:
        return PRESET
    if model.endswith(".json") or "/" in model or Path(model).is_dir():
        return HUGGING_FACE
    return PRESET


def source_of(model: str) -> Source:
    """Return the source of a user's own model; ModelError says in one line what is missing or wrong in its file."""
    kind = kind_of(model)
    path = Path(model).expanduser()
    if kind == FILE:
        _check_python(path)
        return Source(kind, path, path.name)
    if kind == VALUE:  # its file is called NAME-DIGEST.workload
        name, _, _ = path.name.removesuffix(CARRIED).rpartition("-")
        return Source(kind, path, name)
    config = path / "config.json" if path.is_dir() else path
    if not config.is_file():
        raise ModelError(_no_config(model, path))
    _check_config(config)
    name = config.stem
    if config.name == "config.json":  # the folder is called as the model
        name = config.resolve().parent.name
    return Source(kind, config, name)


def check_model(model: object) -> None:
    """Raise ModelError unless `model` names a preset, or a source that can be read; none of its code runs."""
    if not isinstance(model, str):
        raise ModelError(f"model is a {type(model).__name__}; expected a preset's name, a path, or a fsdplab.Workload")
    if is_own(model):
        source_of(model)
    else:
        _check_preset(model)


def name_of(model: str) -> str:
    """Return what a table and a record call a model: never a path, which identifies a machine."""
    if is_own(model):
        return source_of(model).name
    return model


def _check_preset(model: str) -> None:
    if "\0" not in model and model not in SHAPES:
        if Path(f"{model}.py").is_file():
            raise ModelError(f"unknown model {model!r}: did you mean the file {model}.py?")
        if Path(model).is_file():
            raise ModelError(f"the model {model} is a file that is no Python file (.py) and no config.json; {_HOW}")
    preset(model)


def _check_config(path: Path) -> None:
    """Raise ModelError unless `path` is JSON that names a model."""
    try:
        content = json.loads(read_file(path, _LARGEST))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}; expected the config.json of a Hugging Face model") from None
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ModelError(f"{path} names no model_type; expected the config.json of a Hugging Face model")


def _no_config(model: str, path: Path) -> str:
    if path.is_dir():
        return f"the folder {model} holds no config.json, so it is no model of Hugging Face; {_HOW}, or that folder"
    return f"there is no file {model}; {_HOW}, a Hugging Face folder or its config.json, or a preset such as gpt-20m"


def _check_python(path: Path) -> None:
    if path.is_dir():
        raise ModelError(f"{path} is a folder; {_HOW}")
    try:
        text = read_file(path, _LARGEST)
    except FileNotFoundError:
        raise ModelError(f"there is no file {path}; {_HOW}") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}; {_HOW}") from error
    try:
        tree = ast.parse(text, str(path))
    except SyntaxError as error:
        raise ModelError(f"{path}, line {error.lineno}: {error.msg}; mend the file") from None
    except ValueError as error:  # bytes that are no text
        raise ModelError(f"{path} is no Python source: {error}; {_HOW}") from None
    defined = set(_defined(tree.body))
    # a star import or a branch may define what is missing
    if "*" in defined:
        return
    missing = [name for name in NEEDED if name not in defined]
    if missing:
        raise ModelError(f"{path} defines no {' and no '.join(missing)}{_instead(defined)}; {_HOW}")


def _instead(defined: set[str]) -> str:
    """Say what to do about a file that has its own step in place of a loss."""
    if not defined & {"step", "training_step", "train_step"}:
        return ""
    return (
        " (a step of one's own, such as a GAN's two losses, is none that the lab trains, and its memory and time are"
        " not predicted: give one loss, or record the training program itself)"
    )


def _defined(statements: list[ast.stmt]) -> list[str]:
    """Return the names that a module's statements define; "*" where they may define any name."""
    names: list[str] = []
    for statement in statements:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(statement.name)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            names += [alias.asname or alias.name for alias in statement.names]
        elif isinstance(statement, (ast.If, ast.Try, ast.With)):
            names.append("*")  # which of its statements run is known when they do
        else:
            # names that are only read are among them: what is missing in truth is found when the file is imported
            names += [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return names
