"""Causes that stand in a learner's source, whatever its values are: a message that nobody waits for, a loop that ends
in its first round, a condition that always holds, a name or a text that is nearly another one.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import re
import sys
from collections.abc import Sequence

_WAITS = {"wait", "is_completed", "synchronize", "get_future"}
_BEGINNING = {"isend", "irecv", "batch_isend_irecv"}


def unwaited(source: str) -> str:
    """The first call that only begins a message, and whose result is dropped or waited for nowhere; else nothing.

    >>> unwaited("work = dist.isend(a, 1)\\nwork.wait"), unwaited("work = dist.isend(a, 1)\\nwork.wait()")
    ('dist.isend(a, 1)', '')
    """
    nodes = list(ast.walk(ast.parse(source)))
    dropped = {node.value for node in nodes if isinstance(node, ast.Expr)}
    waits = any(isinstance(node, ast.Attribute) and node.attr in _WAITS and node not in dropped for node in nodes)
    begun = (node for node in nodes if isinstance(node, ast.Call) and _begins(node))
    return next((ast.unparse(node) for node in begun if not waits or node in dropped), "")


def _begins(call: ast.Call) -> bool:
    """Whether a call says `async_op=True`, or is one of those that always return before the message has gone."""
    asynchronous = any(each.arg == "async_op" and ast.unparse(each.value) == "True" for each in call.keywords)
    return asynchronous or ast.unparse(call.func).rpartition(".")[2] in _BEGINNING


def one_round(source: str) -> str:
    """The first `for` whose body returns whatever happens, as text; else nothing."""
    for loop in ast.walk(ast.parse(source)):
        if isinstance(loop, ast.For) and _always_returns(loop.body):
            return ast.unparse(loop).partition(":\n")[0]
    return ""


def _always_returns(body: Sequence[ast.stmt]) -> bool:
    """Whether the last statement returns, in each of its branches, and nothing before goes on to the next round."""
    last = body[-1]
    goes_on = any(isinstance(node, (ast.Continue, ast.Break)) for statement in body for node in ast.walk(statement))
    if isinstance(last, ast.If) and last.orelse:
        return not goes_on and _always_returns(last.body) and _always_returns(last.orelse)
    return not goes_on and isinstance(last, ast.Return)


def always_true(source: str) -> str:
    """The first `x == "a" or "b"`, which holds whatever x is, as text; else nothing."""
    either = (each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.BoolOp) and _is_or(each))
    return next((ast.unparse(each) for each in either if any(map(_holds, each.values[1:]))), "")


def _is_or(node: ast.BoolOp) -> bool:
    return isinstance(node.op, ast.Or) and isinstance(node.values[0], ast.Compare)


def _holds(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and bool(node.value)


def other_text(source: str, exercise: str) -> str:
    """What to say of a text that a source compares with, where it stands nowhere in the exercise's file, known mistakes
    apart, and resembles a name there; else nothing.
    """
    exercise = re.sub(r"(?m)^ *#!.*$", "", exercise)
    known = re.findall(r'"([\w-]+)"', exercise)
    compared = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Compare)]
    for text in (node.value for each in compared for node in ast.walk(each) if isinstance(node, ast.Constant)):
        if isinstance(text, str) and text not in exercise and (close := _close(text, known, 0.6)):
            return f'nothing here has the name "{text}", with which this compares: is "{close}" meant?'
    return ""


def nearly(error: str, source: str) -> str:
    """A name that resembles the one that a NameError, or a module, misses; else nothing.

    >>> nearly("AttributeError: module 'torch.distributed' has no attribute 'world_size'", "")
    'get_world_size'
    """
    missing = re.search(r"NameError: name '(?P<name>\w+)' is not defined|module '(.+)' has no attribute '(\w+)'", error)
    if missing is None:
        return ""
    if missing["name"] is None:
        there = [name for name in dir(sys.modules.get(missing[2])) if not name.startswith("_")]
        longer = (name for name in there if set(missing[3].split("_")) <= set(name.split("_")))
        return next(longer, _close(missing[3], there, 0.8))
    nodes = list(ast.walk(ast.parse(source)))
    known = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    known |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    known |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)} | set(dir(builtins))
    return _close(missing["name"], sorted(known), 0.8)


def _close(name: str, known: Sequence[str], cutoff: float) -> str:
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), "")


def returns_a_value(source: str) -> bool:
    """Whether a `return` in the source has something behind it.

    >>> returns_a_value("def half(x): x / 2"), returns_a_value("half = lambda x: x / 2")
    (False, True)
    """
    returned = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Return))
    return any(returned) or "lambda" in source
