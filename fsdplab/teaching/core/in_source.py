"""Causes that stand in a learner's source, whatever its values are: a message that nobody waits for, a loop that ends
in its first round, a value that nobody keeps or reads, a condition that always holds, a name or a text that is nearly
another.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import re
import sys
from collections.abc import Callable, Iterator, Sequence

_WAITS = {"wait", "is_completed", "synchronize", "get_future"}
_BEGINNING = {"isend", "irecv", "batch_isend_irecv"}
_FILLING = {"all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter",
            "reduce_scatter_tensor", "all_to_all", "all_to_all_single"}  # fmt: skip
_CHANGING = {"append", "extend", "insert", "remove", "discard", "clear"}
_GIVING_A_NEW_ONE = {"div", "mul", "sub", "flatten", "reshape", "view_as", "to", "float", "double", "half", "bfloat16"}
_METHODS = {"numel", "element_size", "item", "get_rank", "get_world_size"}
_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_IS_A_RANK = re.compile(r"\b(get_rank\(\)|rank|me) == \d+")


def _nodes(source: str) -> list[ast.AST]:
    """All nodes of a source; none of one that Python cannot read."""
    try:
        return list(ast.walk(ast.parse(source)))
    except SyntaxError:
        return []


def unwaited(source: str) -> str:
    """The first call that only begins a message, and whose result is dropped or waited for nowhere; else nothing.

    >>> unwaited("work = dist.isend(a, 1)\\nwork.wait"), unwaited("work = dist.isend(a, 1)\\nwork.wait()")
    ('dist.isend(a, 1)', '')
    """
    nodes = _nodes(source)
    dropped = {node.value for node in nodes if isinstance(node, ast.Expr)}
    waits = any(isinstance(node, ast.Attribute) and node.attr in _WAITS and node not in dropped for node in nodes)
    begun = (node for node in nodes if isinstance(node, ast.Call) and _begins(node))
    return next((ast.unparse(node) for node in begun if not waits or node in dropped), "")


def _begins(call: ast.Call) -> bool:
    """Whether a call says `async_op=True`, or is one of those that always return before the message has gone."""
    asynchronous = any(each.arg == "async_op" and ast.unparse(each.value) == "True" for each in call.keywords)
    return asynchronous or ast.unparse(call.func).rpartition(".")[2] in _BEGINNING


ONE_ROUND = "the `return` in the loop ends it in its first round: `{}` never comes to the next one"


def one_round(source: str) -> str:
    """The first `for` whose body returns whatever happens, as text; else nothing."""
    for loop in _nodes(source):
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


def other_text(source: str, exercise: str) -> str:
    """What to say of a text that a source compares with, where it stands nowhere in the exercise's file, known mistakes
    apart, and resembles a name there; else nothing.
    """
    exercise = re.sub(r"(?m)^ *#!.*$", "", exercise)
    known = re.findall(r'"([\w-]+)"', exercise)
    compared = [each for each in _nodes(source) if isinstance(each, ast.Compare)]
    for text in (node.value for each in compared for node in ast.walk(each) if isinstance(node, ast.Constant)):
        if isinstance(text, str) and text not in exercise and (close := _close(text.lower(), known, 0.6)):
            return f'nothing here has the name "{text}", with which this compares: is "{close}" meant?'
    return ""


def slip(source: str, reference: str, on_ranks: bool = True) -> str:
    """What a wrong solution's source does that can hardly be meant, and its reference does not; else nothing.

    >>> slip("def half(x):\\n    x / 2\\n    return x", "")
    '`x / 2` stands alone, so its value is lost: assign it (`x /= 2` changes `x` itself)'
    """
    rules = [_lost, _always_true, _never_equal, _none_assigned, _summed_and_lost, _no_attribute]
    rules += [_never_read, _stands_still]
    if not re.search(r"\w\[\w+\] = ", source):  # a list whose places are set afterwards may begin with one tensor
        rules.append(_one_tensor_many_times)
    if on_ranks and not re.search(r"\b(broadcast|scatter|i?send)\w*\(", source):
        rules.append(_one_rank_alone)
    if on_ranks:
        rules.append(_divided_by_its_rank)
    return _first_found(rules, source, reference)


def condition(source: str, reference: str) -> str:
    """What to say of a condition that holds, or does not, whatever the values are; else nothing.

    >>> condition("if storage.nbytes == 0: pass", "")
    '`storage.nbytes` is the function itself, which equals no value: call it, `storage.nbytes()`'
    >>> condition("return type(module) == 'Linear'", "")
    "`type(module) == 'Linear'`: a class equals no text; its name does, `type(module).__name__`"
    """
    return _first_found([_always_true, _never_equal], source, reference)


def other_operation(source: str, reference: str) -> str:
    """The cause where a solution asks a collective for something else than the sum, and its reference does not."""
    return _first_found([_not_the_sum], source, reference)


def _first_found(rules: Sequence[Callable[[ast.AST], str]], source: str, reference: str) -> str:
    nodes, right = _nodes(source), _nodes(reference)
    found = (next(filter(None, map(rule, nodes)), "") for rule in rules if not any(map(rule, right)))
    return next(filter(None, found), "")


def _lost(node: ast.AST) -> str:
    """A statement that computes a value, or names a function, and does nothing with it."""
    if not isinstance(node, ast.Expr):
        return ""
    value, text = node.value, ast.unparse(node)
    if isinstance(value, ast.Attribute):
        return f"`{text}` alone does nothing: a function is called by `{text}()`, a value is assigned to something"
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _GIVING_A_NEW_ONE:
        return f"`{text}` gives a new value and changes nothing, and it is lost: assign it"
    if isinstance(value, ast.BinOp):
        in_place = f"{ast.unparse(value.left)} {_SIGNS.get(type(value.op), '')}= {ast.unparse(value.right)}"
        more = f" (`{in_place}` changes `{ast.unparse(value.left)}` itself)" if type(value.op) in _SIGNS else ""
        return f"`{text}` stands alone, so its value is lost: assign it{more}"
    return ""


def _always_true(node: ast.AST) -> str:
    """`state == "a" or "b"`, `name.endswith("a") or "b"`."""
    if not (isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or)):
        return ""
    first = node.values[0]
    if not (
        isinstance(first, ast.Compare) or ast.unparse(first).partition("(")[0].endswith(("endswith", "startswith"))
    ):
        return ""
    alone = [ast.unparse(each) for each in node.values[1:] if isinstance(each, ast.Constant) and each.value]
    why = f"is always true, because {alone[0]} alone is: compare with each, `in (..., {alone[0]})`" if alone else ""
    return why and f"`{ast.unparse(node)}` {why}"


def _never_equal(node: ast.AST) -> str:
    """`storage.nbytes == 0`, `type(module) == "Linear"`."""
    if not isinstance(node, ast.Compare):
        return ""
    for side in (node.left, *node.comparators):
        text = ast.unparse(side)
        if isinstance(side, ast.Attribute) and (side.attr in _METHODS or re.search(r"storage(\(\))?\.nbytes$", text)):
            return f"`{text}` is the function itself, which equals no value: call it, `{text}()`"
    text = ast.unparse(node)
    if re.match(r"type\(.*\) (==|!=|is|is not) ['\"]", text):
        return f"`{text}`: a class equals no text; its name does, `{text.partition(')')[0]}).__name__`"
    return ""


def _one_tensor_many_times(node: ast.AST) -> str:
    """`[torch.empty_like(x)] * n`."""
    text = ast.unparse(node) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) else ""
    made = re.match(r"\[[\w.]+\.(new_)?(empty|zeros|clone)(_like)?\(.*\)\] \* ", text)
    return f"`{text}` is one tensor many times: make each of them, `[... for _ in range(n)]`" if made else ""


def _none_assigned(node: ast.AST) -> str:
    """`total = dist.all_reduce(x)`, where nothing is begun that is waited for."""
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
        return ""
    call, name = node.value, ast.unparse(node.value.func).rpartition(".")[2]
    if name in _CHANGING:
        return f"`{name}` changes the object itself and returns None, and `{ast.unparse(node)}` keeps that None"
    if name == "recv":
        return f"`recv` fills its tensor, and returns the number of the sender: not so `{ast.unparse(node)}`"
    if name not in _FILLING or any(each.arg == "async_op" for each in call.keywords):
        return ""
    return f"`{name}` returns None: it writes into the tensor that it is given, so go on with that one"


def _summed_and_lost(node: ast.AST) -> str:
    """`dist.all_reduce(x / n)`: the result goes into a value that has no name."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.args):
        return ""
    called, given = ast.unparse(node.value.func).rpartition(".")[2], node.value.args[0]
    made = isinstance(given, ast.Call) and ast.unparse(given.func).rpartition(".")[2] in {"clone", *_GIVING_A_NEW_ONE}
    if called not in ("all_reduce", "broadcast", "reduce") or not (made or isinstance(given, ast.BinOp)):
        return ""
    return f"`{called}` writes into `{ast.unparse(given)}`, a new value that is lost: give it a name, and go on with it"


def _never_read(node: ast.AST) -> str:
    """`grad = grad / n` where a function ends, or a round of its loop that begins with another `grad`."""
    if not isinstance(node, ast.FunctionDef):
        return ""
    own = list(_own(node))
    inner = [each for each in own if isinstance(each, (ast.FunctionDef, ast.Lambda))]
    shared = {name for each in own if isinstance(each, (ast.Global, ast.Nonlocal)) for name in each.names}
    blocks: list[ast.FunctionDef | ast.For] = [node, *(each for each in own if isinstance(each, ast.For))]
    for block in blocks:
        last = block.body[-1]
        if not (isinstance(last, ast.Assign) and isinstance(last.value, ast.BinOp)):
            continue
        name, sign, before = ast.unparse(last.targets[0]), _SIGNS.get(type(last.value.op)), block.body[:-1]
        anew = block is node or name in _names([each for each in before if isinstance(each, ast.Assign)], ast.Store)
        behind = [each for each in own if getattr(each, "lineno", 0) > last.lineno]
        if name.isidentifier() and anew and name not in shared | _names([*inner, *behind], ast.Load):
            itself = sign and ast.unparse(last.value.left) == name
            instead = f"`{name} {sign}= {ast.unparse(last.value.right)}` changes `{name}` itself" if itself else ""
            told = f"`{ast.unparse(last)}` makes a new value that nothing reads afterwards: "
            return told + (instead or "put it where it belongs")
    return ""


def _no_attribute(node: ast.AST) -> str:
    """`parameter.require_grad = False`."""
    if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store) or node.attr == "requires_grad":
        return ""
    if node.attr == "requires_grad_":
        return "`requires_grad_` is a method, and `= ...` only hides it: call it, `.requires_grad_(False)`"
    close = _close(node.attr, ["requires_grad"], 0.8)
    return close and f"no tensor has an attribute `{node.attr}`, so Python makes a new one that nobody reads: `{close}`"


def _stands_still(node: ast.AST) -> str:
    """`at = 0`, and in a loop `x[at : at + n]`, where nothing else sets `at`."""
    inner, text = list(ast.walk(node)), ast.unparse(node) if isinstance(node, ast.FunctionDef) else ""
    stored = [each.id for each in inner if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
    for loop in (ast.unparse(each) for each in inner if text and isinstance(each, ast.For)):
        for name in re.findall(r"\b(\w+):\1 \+ ", loop):
            zero = rf"\b{name} = (0|\(.*, 0\))$|^ *{name}, .* = \(0, "
            if stored.count(name) == 1 and re.search(zero, text, re.MULTILINE):
                return f"every round takes its piece from `{name}` on, which stays 0: add each piece's length to it"
    return ""


def _one_rank_alone(node: ast.AST) -> str:
    """`if dist.get_rank() == 0:` around more than a print."""
    if not isinstance(node, ast.If) or node.orelse or not _IS_A_RANK.search(ast.unparse(node.test)):
        return ""
    if all(ast.unparse(each).startswith("print(") for each in node.body):
        return ""
    return f"`if {ast.unparse(node.test)}:` lets one rank alone do what stands there; every rank has to"


def _divided_by_its_rank(node: ast.AST) -> str:
    divisor = node.value if isinstance(node, ast.AugAssign) else node.right if isinstance(node, ast.BinOp) else None
    if divisor is None or not isinstance(getattr(node, "op", None), (ast.Div, ast.FloorDiv)):
        return ""
    by = ast.unparse(divisor)
    if not re.fullmatch(r"((\w+\.)?get_rank\(\)|rank)( \+ 1)?", by):
        return ""
    return f"this divides by `{by}`, the rank's own number: how many ranks there are says `dist.get_world_size()`"


def _not_the_sum(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute) and node.attr in ("MAX", "MIN", "PRODUCT"):
        return f"`{ast.unparse(node)}` does not add up over the ranks: leave `op` out for the sum"
    return ""


def overwritten(source: str) -> str:
    """A variable that every round of a loop sets anew and that is read behind it only, as text; else nothing.

    >>> overwritten("n = 0; total = 0\\nfor x in xs: n += 1; total = x * x\\nprint(n, total)")
    'total = x * x'
    """
    blocks = (getattr(node, "body", ()) for node in _nodes(source))
    for block in (each for each in blocks if isinstance(each, list)):
        for place, loop in enumerate(block):
            found = _set_anew(loop, block[:place], block[place + 1 :]) if isinstance(loop, ast.For) else ""
            if found:
                return found
    return ""


def _set_anew(loop: ast.For, before: Sequence[ast.stmt], behind: Sequence[ast.stmt]) -> str:
    read_behind_only = (_names(before, ast.Store) & _names(behind, ast.Load)) - _names(loop.body, ast.Load)
    searches = any(isinstance(node, (ast.Break, ast.Continue, ast.Return)) for node in ast.walk(loop))
    assigned = (each for each in loop.body if isinstance(each, ast.Assign) and not searches)
    return next((ast.unparse(each) for each in assigned if _names(each.targets, ast.Store) & read_behind_only), "")


def _names(parts: Sequence[ast.AST], context: type[ast.expr_context]) -> set[str]:
    """The names that these parts of a source read (Load) or set (Store)."""
    nodes = (node for part in parts for node in ast.walk(part))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, context)}


def other_numbers(source: str, reference: str) -> bool:
    """Whether a number stands in a source, alone or in a text, that its reference does not hold; 0 and 1 do not count,
    and docstrings are not read.

    >>> other_numbers("def mean(x): return x / 3", "def mean(x): return x / n()"), other_numbers("x[0] + 1", "x")
    (True, False)
    """
    return not _numbers(source) <= _numbers(reference) | {"0", "1"}


def _numbers(source: str) -> set[str]:
    nodes = _nodes(source)
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    constants = (node.value for node in nodes if isinstance(node, ast.Constant) and node not in docstrings)
    texts = (f"{each:g}" if isinstance(each, float) else str(each) for each in constants if each is not None)
    return {number for text in texts for number in re.findall(r"\d+", text)}


def set_outside(source: str, name: str) -> bool:
    """Whether more than one function of a source, or one and the file itself, sets a name or takes it."""
    places = (node for node in _nodes(source) if isinstance(node, (ast.Module, ast.FunctionDef)))
    return sum(name in map(_set_by, _own(place)) for place in places) > 1


def _own(place: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function or file without those of the functions in it."""
    for node in ast.iter_child_nodes(place):
        yield node
        if not isinstance(node, ast.FunctionDef):
            yield from _own(node)


def _set_by(node: ast.AST) -> str:
    if isinstance(node, ast.arg):
        return node.arg
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else ""


def nearly(error: str, source: str) -> str:
    """A name that resembles the one that a NameError, a KeyError, or a module misses; else nothing.

    >>> nearly("AttributeError: module 'torch.distributed' has no attribute 'world_size'", "")
    'get_world_size'
    """
    if key := re.search(r"KeyError: '(.+)'", error):
        texts = (node.value for node in _nodes(source) if isinstance(node, ast.Constant))
        return _close(key[1], [text for text in texts if isinstance(text, str) and text != key[1]], 0.8)
    missing = re.search(r"NameError: name '(?P<name>\w+)' is not defined|module '(.+)' has no attribute '(\w+)'", error)
    if missing is None:
        return ""
    if missing["name"] is None:
        there = [name for name in dir(sys.modules.get(missing[2])) if not name.startswith("_")]
        longer = (name for name in there if set(missing[3].split("_")) <= set(name.split("_")))
        return min(longer, key=len, default=_close(missing[3], there, 0.8))
    nodes = _nodes(source)
    known = variables(source) - {missing["name"]}  # that one is another function's
    known |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    known |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)} | set(dir(builtins))
    return _close(missing["name"], sorted(known), 0.8)


def variables(source: str) -> set[str]:
    """The names that a source assigns to, and those of its functions' arguments."""
    nodes = _nodes(source)
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return assigned | {node.arg for node in nodes if isinstance(node, ast.arg)}


def _close(name: str, known: Sequence[str], cutoff: float) -> str:
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), "")


def returns_a_value(source: str) -> bool:
    """Whether a `return` in the source has something behind it.

    >>> returns_a_value("def half(x): x / 2"), returns_a_value("half = lambda x: x / 2")
    (False, True)
    """
    returned = (node.value for node in _nodes(source) if isinstance(node, ast.Return))
    return any(returned) or "lambda" in source


def never_read(source: str, reference: str, function: str) -> list[str]:
    """The arguments of a function that a source does not read anywhere, where its reference reads them.

    >>> never_read("def area(a, b): return 6 * a", "def area(a, b): return a * b", "area")
    ['b']
    """
    mine, theirs = (_arguments(text, function) for text in (source, reference))
    return [name for name, read, other in zip(mine, mine.values(), theirs.values()) if other and not read]


def _arguments(source: str, function: str) -> dict[str, bool]:
    """The arguments of a function, and whether its body reads them."""
    functions = [node for node in _nodes(source) if isinstance(node, ast.FunctionDef)]
    found = next((node for node in functions if node.name == function), None)
    if found is None or found.args.vararg or found.args.kwarg:
        return {}
    read = {node.id for node in ast.walk(found) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return {each.arg: each.arg in read for each in found.args.args}


def other_order(source: str, reference: str, function: str) -> str:
    """The arguments of a function in the order of its reference, where a source has them in another; else nothing."""
    mine, theirs = (list(_arguments(text, function)) for text in (source, reference))
    return ", ".join(theirs) if mine != theirs and sorted(mine) == sorted(theirs) else ""


def kept_from_the_result(source: str) -> str:
    """A copy that a function makes, adds up over the ranks and reads nowhere else, by its name; else nothing.

    >>> kept_from_the_result("def f(x):\\n    y = x.clone()\\n    dist.all_reduce(y)\\n    return x")
    'y'
    """
    nodes = _nodes(source)
    read = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    copies = {
        ast.unparse(node.targets[0])
        for node in nodes
        if isinstance(node, ast.Assign) and ast.unparse(node.value).endswith(".clone()")
    }
    summed = (
        ast.unparse(node.args[0])
        for node in nodes
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith("all_reduce")
    )
    return next((name for name in summed if name in copies and read.count(name) == 1), "")


def other_division(source: str, reference: str) -> str:
    """The one of `/` and `//` that a source has and its reference has not, which has the other alone; else nothing."""
    mine, theirs = (
        {type(node.op) for node in _nodes(text) if isinstance(node, (ast.BinOp, ast.AugAssign))}
        for text in (source, reference)
    )
    if ast.Div in mine - theirs and ast.FloorDiv in theirs:
        return "/"
    return "//" if ast.FloorDiv in mine - theirs and ast.Div in theirs else ""


def rounded_down(source: str, reference: str) -> str:
    """The first `a // b` of a source that rounds down, where its reference only rounds up, by `-(-a // b)`."""
    mine, theirs = (
        [node for node in _nodes(text) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv)]
        for text in (source, reference)
    )
    if not theirs or not all(isinstance(node.left, ast.UnaryOp) for node in theirs):
        return ""
    return next((ast.unparse(node) for node in mine if not isinstance(node.left, (ast.UnaryOp, ast.BinOp))), "")


def minus_a_fraction(source: str, reference: str) -> str:
    """A `s - 1 / s` of a source, which means `s - (1 / s)`, where its reference has none; else nothing."""
    mine, theirs = (
        [ast.unparse(node) for node in _nodes(text) if _is_minus_a_fraction(node)] for text in (source, reference)
    )
    return mine[0] if mine and not theirs else ""


def _is_minus_a_fraction(node: ast.AST) -> bool:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Sub) or isinstance(node.left, ast.Constant):
        return False
    return isinstance(node.right, ast.BinOp) and ast.unparse(node.right).startswith("1 / ")


def endless(source: str, stood: str) -> str:
    """The `while` around the line where a call stood when its time was up, where its rounds call nothing; else nothing.

    >>> endless("n = 1\\nwhile n > 0:\\n    n *= 2", "it stood in a.py, line 3: n *= 2")
    'while n > 0'
    """
    loops = [node for node in _around(source, stood) if isinstance(node, ast.While)]
    calls = any(isinstance(node, ast.Call) for loop in loops for node in ast.walk(loop))
    return f"while {ast.unparse(loops[-1].test)}" if loops and not calls else ""


def for_some_ranks(source: str, stood: str) -> str:
    """The `if` about the rank around the line where a call stood when its time was up, without what follows it."""
    asked = [node for node in _around(source, stood) if isinstance(node, ast.If) and "rank" in ast.unparse(node.test)]
    return f"if {ast.unparse(asked[-1].test)}" if asked and not asked[-1].orelse else ""


def _around(source: str, stood: str) -> list[ast.stmt]:
    """The statements of a source around the line that such a sentence names: `"it stood in a.py, line 3: n *= 2"`."""
    line = int((re.search(r"line (\d+): ", stood) or ["", "0"])[1])
    statements = [node for node in _nodes(source) if isinstance(node, ast.stmt)]
    return [node for node in statements if node.lineno <= line <= (node.end_lineno or 0)]
