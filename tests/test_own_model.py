"""A model of one's own before it is trained: what is refused, what is found in it, and how it comes to ranks."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from fsdplab import RunSpec, Workload
from fsdplab.sessions import SpecError, compare_runs
from fsdplab.sessions.formula import formula_bytes
from fsdplab.sessions.launch.failure_report import Failure
from fsdplab.sessions.launch.stacks import of_own_code
from fsdplab.sessions.prediction import predict
from fsdplab.sessions.run_and_record import check_code
from fsdplab.sessions.steady_card import spec_of
from fsdplab.workloads.errors import ModelError
from fsdplab.workloads.own.carried import saved, workload_from
from fsdplab.workloads.own.reading import workload_in
from fsdplab.workloads.own.sources import name_of, source_of
from fsdplab.workloads.own.value import one_scalar
from fsdplab.workloads.units import named_class, of_classes, repeated_block
from fsdplab.workloads.workload import At

from .own_models import zoo

MINE = Path(__file__).parent / "own_models" / "mine.py"
REST = "def model(): ...\ndef batch(at): ...\ndef loss(model, batch): ...\n"


def refused(tmp_path: Path, text: str) -> str:
    """What is said of a file with this text, before any rank starts."""
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises((SpecError, ModelError)) as caught:
        check_code(RunSpec(model=str(path)))
    return str(caught.value)


@pytest.mark.parametrize(
    "text,words",
    [
        ("def batch(at): ...\ndef loss(model, batch): ...\n", "defines no model; expected a Python file with model()"),
        ("import torch\n", "defines no model and no batch and no loss"),
        ("def model(: ...\n", "line 1: "),
        (REST + "\nunits = ['Block']\n", "units has a str; expected classes of modules"),
        (REST + "\nunits = 3\n", "units is an int; expected a list of module classes"),
        (REST + "\nclass A: ...\nunits = [A]\n", "units has the class A; expected classes of modules"),
        (REST + "\nmissing.name\n", "cannot be imported: line 5, NameError: name 'missing' is not defined"),
        ("import nowhere_at_all\n" + REST, "cannot be imported: line 1, ModuleNotFoundError: No module named"),
        ("import sys\n" + REST + "sys.exit('enough')\n", "cannot be imported: line 5, SystemExit: enough"),
        (REST + "\nbatch = 3\n", "mine.py: batch is an int; expected a function of at"),
        ("import torch\n" + REST + "model = torch.nn.Linear(1, 1)\n", "model is a Linear; expected a function that"),
        (REST + "optimizer = 'adam'\n", "optimizer is a str; expected a function of a list of parameters"),
        ("def model(): ...\ndef batch(at): ...\ndef step(model, batch, optimizer): ...\n", "a GAN's two losses"),
    ],
)
def test_a_wrong_file_gets_one_sentence_before_ranks_start(tmp_path, text, words):
    said = refused(tmp_path, text)
    assert words in said and "\n" not in said, said


@pytest.mark.parametrize(
    "make,words",
    [
        (lambda folder: folder, "holds no config.json"),
        (lambda folder: folder / "nothing.py", "there is no file"),
        (lambda folder: (folder / "as.py").mkdir() or folder / "as.py", "is a folder; expected a Python file"),
        (lambda folder: folder / "nothing" / "config.json", "there is no file"),
        (lambda folder: _written(folder / "config.json", "{"), "cannot be read"),
        (lambda folder: _written(folder / "config.json", "[]"), "names no model_type"),
        (lambda folder: _written(folder / "raw.py", "\0"), "raw.py"),
    ],
)
def test_a_wrong_path_gets_one_sentence(tmp_path, make, words):
    with pytest.raises(SpecError, match=words) as caught:
        RunSpec(model=str(make(tmp_path)))
    assert caught.value.field == "model" and "\n" not in str(caught.value)


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_name_that_is_a_file_beside_it_is_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _written(tmp_path / "own.py", REST), _written(tmp_path / "notes.txt", "")
    with pytest.raises(SpecError, match="did you mean the file own.py"):
        RunSpec(model="own")
    with pytest.raises(SpecError, match=r"notes.txt is a file that is no Python file"):
        RunSpec(model="notes.txt")


def test_checking_a_request_runs_no_code(tmp_path):
    path = _written(tmp_path / "mine.py", REST + "raise SystemExit('was run')\n")
    RunSpec(model=str(path))
    assert RunSpec(model=path).model == str(path)


def test_a_file_finds_the_modules_beside_it(tmp_path):
    _written(tmp_path / "beside_mine.py", "WIDTH = 7\n")
    path = _written(tmp_path / "uses_it.py", "import torch\nfrom beside_mine import WIDTH\n" + REST.replace(
        "def model(): ...", "def model(): return torch.nn.Linear(WIDTH, 1)"))  # fmt: skip
    assert workload_in(path).build("cpu", 0).in_features == 7


def test_a_file_that_changes_the_working_folder_leaves_that_of_its_reader(tmp_path, monkeypatch):
    """Its own path, and that of a record, are relative to it; a rank stays where the file went, to read its data."""
    (tmp_path / "sub").mkdir()
    _written(tmp_path / "sub" / "goes.py", "import os\nos.chdir(os.path.dirname(__file__))\n" + REST)
    _written(tmp_path / "sub" / "fails.py", "import os\nos.chdir('/')\n1 / 0\n" + REST)
    monkeypatch.chdir(tmp_path)
    for name in ("goes", "fails"):
        with contextlib.suppress(ModelError):
            check_code(RunSpec(model=f"sub/{name}.py"))
        assert Path.cwd() == tmp_path
    (tmp_path / "sub" / "width.txt").write_text("7")
    source = "import os, torch\nos.chdir(os.path.dirname(__file__))\n" + REST
    reads = "def model(): return torch.nn.Linear(int(open('width.txt').read()), 1)"
    _written(tmp_path / "sub" / "reads.py", source.replace("def model(): ...", reads))
    assert workload_in(Path("sub/reads.py")).build("cpu", 0).in_features == 7 and Path.cwd() == tmp_path
    monkeypatch.setenv("FSDPLAB_TEMPORARY", "as in a rank")
    _written(tmp_path / "sub" / "goes.py", "import os\nos.chdir(os.path.dirname(__file__))\n" + REST + "# changed\n")
    workload_in(Path("sub/goes.py"))
    assert Path.cwd() == tmp_path / "sub"


def test_a_file_is_read_again_after_an_edit(tmp_path):
    path = _written(tmp_path / "edited.py", REST + "units = []\n")
    assert workload_in(path).given_units == () and workload_in(path) is workload_in(path)
    _written(path, REST)
    assert workload_in(path).given_units is None


def test_an_own_model_is_predicted_and_what_cannot_be_says_why(tmp_path):
    spec = RunSpec(model=str(MINE))
    found = predict(spec)
    assert found.peak_bytes and found.bytes_per_step and not found.why_not and formula_bytes(spec) is None
    own = _written(tmp_path / "own.py", MINE.read_text() + "def optimizer(parameters): ...\n")
    unknown = predict(RunSpec(model=own))
    assert unknown.peak_bytes is None and unknown.bytes_per_step
    assert "optimizer(parameters) returned None; expected one torch.optim.Optimizer" in unknown.why_not
    broken = _written(tmp_path / "broken.py", MINE.read_text().replace(".square().mean()", ".sqare().mean()"))
    assert "AttributeError: " in predict(RunSpec(model=broken)).why_not


def test_what_an_own_model_lacks_is_refused():
    spec = RunSpec(model=str(MINE))
    assert spec.tokens_per_rank is None
    with pytest.raises(SpecError, match="emulate needs the model's size"):
        RunSpec(model=str(MINE), emulate="8xH100", as_model="llama-3.1-8b")
    with pytest.raises(SpecError, match="unknown units 'GPTBlock'.*; expected one of auto"):
        RunSpec(units="GPTBlock")


def test_a_record_has_the_name_alone_and_nothing_is_read_by_it():
    class Recorded:
        spec = {**RunSpec(model=str(MINE)).as_dict(), "model": name_of(str(MINE))}

    assert Recorded.spec["model"] == "mine.py" and spec_of(Recorded) is None
    assert source_of(str(MINE)).text == MINE.read_text() and len(source_of(str(MINE)).digest) == 16


# ---- a workload as a value


@pytest.mark.parametrize(
    "given,words",
    [
        (dict(model=nn.Linear(1, 1)), "model is a Linear; expected a function that returns an nn.Module"),
        (dict(batch=None), "batch is None; expected a function of at"),
        (dict(loss="mse"), "loss is a str; expected a function of the model"),
        (dict(units=[nn.Linear(1, 1)]), "units has a Linear"),
        (dict(units="Block"), "units is a str"),
    ],
)
def test_a_wrong_argument_gets_one_sentence(given, words):
    with pytest.raises(ModelError, match=words):
        Workload(**{"model": zoo.stack, "batch": zoo.numbers, "loss": zoo.squares, **given})


def test_equal_weights_come_from_one_seed_and_torch_goes_on_as_before():
    work = Workload(zoo.stack, zoo.numbers, zoo.squares)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    one, same, other = work.build("cpu", 1), work.build("cpu", 1), work.build("cpu", 2)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(one[0].inner.weight, same[0].inner.weight)
    assert not torch.equal(one[0].inner.weight, other[0].inner.weight)
    assert all(each.is_meta for each in work.build("meta", 1).parameters())


def test_a_batch_that_draws_without_its_generator_is_the_same_for_the_twin():
    """The run's losses were said to differ from the reference's: only the batches did."""
    work = Workload(
        model=lambda: nn.Linear(1, 1),
        batch=lambda at: (torch.rand(2).tolist(), random.random(), numpy.random.rand()),
        loss=lambda model, batch: 0,
    )
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    first, other_rank = (work.batch(At(0, rank, 2)) for rank in (0, 1))
    assert first == work.batch(At(0, 0, 2)) and not {*first[0], *first[1:]} & {*other_rank[0], *other_rank[1:]}
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert numpy.random.get_state()[1].tolist() == before[2], "a notebook's own numbers go on as before"


def test_a_model_that_is_none_or_has_nothing_to_train_is_refused():
    with pytest.raises(ModelError, match="model\\(\\) returned None; expected an nn.Module"):
        Workload(lambda: None, zoo.numbers, zoo.squares).build("cpu", 0)
    with pytest.raises(ModelError, match="no parameter that requires a gradient"):
        Workload(nn.ReLU, zoo.numbers, zoo.squares).build("cpu", 0)


def test_dropout_draws_the_same_for_one_batch_and_other_numbers_for_another():
    work = zoo.ZOO["dropout"]()
    model, at = work.build("cpu", 0), At(step=1, rank=0, world_size=2)
    first = work.seeded_loss(model, work.drawn(at)).item()
    torch.rand(5)
    assert work.seeded_loss(model, work.drawn(at)).item() == first
    assert work.seeded_loss(model, work.drawn(At(step=2, rank=0, world_size=2))).item() != first
    assert work.samples(work.drawn(at)) == 8


def test_a_batch_that_was_not_moved_to_its_device_gets_one_sentence():
    """The meta device stands for a GPU: a product of tensors on two devices raises an error of torch's own."""
    work = Workload(lambda: nn.Linear(3, 2), lambda at: torch.ones(3), lambda model, x: model(x).sum())
    at = At(0, 0, 1, device=torch.device("meta"))
    words = r"batch\(at\) returned a tensor .* on cpu, but at.device is meta; expected tensors moved with .to\(at.dev"
    with pytest.raises(ModelError, match=words):
        work.seeded_loss(work.build("meta", 0), work.drawn(at))
    kept = Workload(lambda: nn.Linear(3, 2), lambda at: (torch.ones(3), torch.ones(3).to(at.device)), broken)
    with pytest.raises(RuntimeError, match="the user's own"):
        kept.seeded_loss(kept.build("meta", 0), kept.drawn(at))


def broken(model, batch):
    raise RuntimeError("the user's own")


def test_several_losses_are_one_scalar():
    one, two = torch.tensor(1.0, requires_grad=True), torch.tensor([2.0], requires_grad=True)
    assert one_scalar({"a": one, "b": two}).item() == 3 and one_scalar((one, two)).item() == 3
    assert one_scalar({"loss": one, "accuracy": "high"}).item() == 1 and one_scalar(two).shape == ()
    for wrong, words in (
        (torch.ones(2), r"a tensor of shape \[2\]"), (1.0, "a float"), (None, "None"), ({}, "a dict"),
        (torch.ones(()), "without a gradient"), ((one, "b"), "a str"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=words):
            one_scalar(wrong)


def test_a_whole_compiled_model_is_taken_without_its_compiler():
    def made() -> nn.Module:
        model = zoo.stack()
        model._compiled_call_impl = lambda *_: None  # as model.compile() sets it
        return model

    work = Workload(made, zoo.numbers, zoo.squares)
    model = work.build("cpu", 0)
    assert model._compiled_call_impl is None and any("torch.compile" in note for note in work.notes(model))


# ---- units


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(zoo.Block() for _ in range(2))


@pytest.mark.parametrize(
    "make,many,words",
    [
        (zoo.stack, 3, "the repeated block: 3 x Block"),
        (zoo.Tied, 3, "3 x Block"),
        (zoo.Unused, 5, "5 x Block"),
        (zoo.Pictures, 3, "3 x Sequential"),
        (zoo.Plain, 2, "repeats no block; the units are its largest parts: read, write"),
        (zoo.Shared, 2, "2 x Block"),
        (lambda: nn.Linear(2, 2), 0, "no two large parts"),
        (lambda: nn.Sequential(Stage(), Stage()), 2, "2 x Stage"),
        (lambda: nn.ModuleDict({"a": nn.Linear(9, 9), "b": nn.Linear(9, 8)}), 2, "largest parts: a, b"),
        (
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3),
            3,
            "3 x TransformerEncoderLayer",
        ),
        (
            lambda: nn.Transformer(8, 2, 2, 3, 16, batch_first=True),
            5,
            "the repeated blocks: 2 x TransformerEncoderLayer, 3 x TransformerDecoderLayer.",
        ),
        (
            # of 12,833,281 parameters 33,281 are in the two layers
            lambda: nn.ModuleList([nn.Embedding(200_000, 64), nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 1))]),
            2,
            "the repeated block: 2 x Linear; 99.7 % of the parameters are in none of them",
        ),
        (lambda: nn.Sequential(*(zoo.Block() for _ in range(9)), nn.LayerNorm(4), nn.LayerNorm(4)), 9, "9 x Block."),
    ],
)
def test_units_are_found(make, many, words):
    found = repeated_block(make())
    assert len(found.modules) == many and words in found.sentence, found.sentence


class AsAUnitsInput(torch.autograd.Function):
    """The identity that engines apply to the inputs of a unit."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_a_unit_that_changes_its_input_in_place_is_told_so_with_its_line():
    def loss(model, x):
        changed = AsAUnitsInput.apply(model(x))
        changed += 1
        return changed.sum()

    work = Workload(model=lambda: nn.Linear(4, 4), batch=lambda at: torch.ones(2, 4), loss=loss)
    drawn = work.drawn(At(step=0, rank=0, world_size=1))
    with pytest.raises(ModelError, match=r"changes its input in place \(test_own_model.py, line \d+: changed \+= 1\)"):
        work.seeded_loss(work.build("cpu", 0), drawn)


def test_units_by_a_class_or_its_name():
    model = zoo.stack()
    assert len(named_class(model, "Linear").modules) == 4 and len(of_classes(model, [zoo.Block]).modules) == 3
    with pytest.raises(ModelError, match="units is 'Blok' .did you mean Block.*expected auto, model, linear or one of"):
        named_class(model, "Blok")
    with pytest.raises(ModelError, match="units has LSTM"):
        of_classes(model, [nn.LSTM])


def test_a_unit_that_shares_a_parameter_with_others_is_left_to_the_root():
    assert not any(module is zoo.Tied for module in of_classes(zoo.Tied(), [nn.Embedding]).modules)


# ---- to ranks, and back


def test_a_workload_of_modules_comes_back_by_reference():
    work = Workload(zoo.stack, zoo.numbers, zoo.squares, units=[zoo.Block])
    path = saved(work)
    back = workload_from(Path(path))
    assert back.functions == work.functions and back.given_units == (zoo.Block,) and saved(work) == path
    assert RunSpec(model=work).model == path and name_of(path) == "stack" and "def stack" in source_of(path).text


def test_what_cannot_be_sent_is_named():
    lines = (line for line in "ab")
    with pytest.raises(SpecError, match="loss cannot be sent to ranks: .*generator.*make files, locks"):
        RunSpec(model=Workload(zoo.stack, zoo.numbers, lambda model, batch: next(lines)))


def test_a_large_value_that_comes_along_is_warned_of():
    large = torch.zeros(6_000_000)
    with pytest.warns(RuntimeWarning, match="the workload stack is 24.0 MB, which every rank reads"):
        saved(Workload(zoo.stack, zoo.numbers, lambda model, batch: large.sum()))


def test_a_traceback_begins_with_the_users_own_line():
    work = Workload(zoo.stack, zoo.numbers, zoo.squares)
    with pytest.raises(RuntimeError) as caught:
        work.loss(work.build("cpu", 0), (torch.zeros(2, 3), torch.zeros(2)))
    text = of_own_code(caught.value)
    assert "test_own_model.py" in text.splitlines()[1] and "value.py" not in text and "zoo.py" in text


CELLS = '''
import sys
from IPython.core.interactiveshell import InteractiveShell
import __main__
shell = InteractiveShell.instance()
shell.user_module, shell.user_ns = __main__, vars(__main__)
cells = ["""
import torch, fsdplab
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
    def forward(self, x):
        return x + self.inner(x).relu()
WIDTH = 24
""", """
def model():
    return nn.Sequential(*(Block() for _ in range(3)), nn.Linear(WIDTH, 1))
def batch(at):
    return torch.randn(4, WIDTH, generator=at.generator)
def loss(model, batch):
    return model(batch).square().mean()
records = fsdplab.compare(fsdplab.Workload(model, batch, loss, units=[Block]), strategies=["zero2", "full_shard"],
    steps=1, profile=0)
print(*(r.environment["workload"]["units"] for r in records), len({r.summary.losses for r in records}))
print("class Block" in (records[0].path / "model_source.txt").read_text(), records[0].spec["model"])
""", """
def loss(model, batch):
    return model(batch).sqare().mean()
try:
    fsdplab.run(fsdplab.Workload(model, batch, loss), steps=1)
except fsdplab.sessions.RanksFailed as failed:
    print(failed)
"""]
for cell in cells:
    done = shell.run_cell(cell)
    done.raise_error()
'''


def test_functions_and_classes_of_cells_are_trained_and_their_errors_show_the_cells_line():
    done = subprocess.run([sys.executable, "-c", CELLS], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "3 x Block 3 x Block 3 x Block 1" and lines[1] == "True own model"
    assert "raised in step 0 (forward): AttributeError" in done.stdout
    assert "    return model(batch).sqare().mean()\n" in done.stdout and "fsdplab/" not in done.stdout


@pytest.mark.quick
def test_the_engines_frames_are_told_by_the_packages_own_folder(tmp_path):
    """A user's folder may be called fsdplab too."""

    def failed(file: str) -> Failure:
        return Failure("raised", "Rank 0 raised: ...", 0, traceback=f'  File "{file}", line 3, in forward\n    x\n')

    assert compare_runs._is_the_models(failed(str(tmp_path / "fsdplab" / "mine.py")))
    assert not compare_runs._is_the_models(failed(compare_runs.__file__))
