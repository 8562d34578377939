"""Causes that stand in a learner's source, whatever its values are: a message that nobody waits for, a loop that ends
in its first round, a name that is nearly another one.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import re
from collections.abc import Sequence

_WAITS = {"wait", "is_completed", "synchronize", "get_future"}


def unwaited(source: str) -> str:
    """The first call with `async_op=True`, in a source that waits nowhere; else nothing."""
    nodes = list(ast.walk(ast.parse(source)))
    if any(isinstance(node, ast.Attribute) and node.attr in _WAITS for node in nodes):
        return ""
    begun = (node for node in nodes if isinstance(node, ast.Call) and any(map(_asynchronous, node.keywords)))
    return next((ast.unparse(node) for node in begun), "")


def _asynchronous(keyword: ast.keyword) -> bool:
    return keyword.arg == "async_op" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True


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


def nearly(error: str, source: str) -> str:
    """A name of the source, or of Python, that resembles the one that a NameError misses; else nothing."""
    missing = re.search(r"NameError: name '(\w+)' is not defined", error)
    if missing is None:
        return ""
    nodes = list(ast.walk(ast.parse(source)))
    known = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    known |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    known |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)} | set(dir(builtins))
    return next(iter(difflib.get_close_matches(missing[1], sorted(known), n=1, cutoff=0.8)), "")


def returns_a_value(source: str) -> bool:
    """Whether a `return` in the source has something behind it.

    >>> returns_a_value("def half(x): x / 2"), returns_a_value("half = lambda x: x / 2")
    (False, True)
    """
    returned = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Return))
    return any(returned) or "lambda" in source
