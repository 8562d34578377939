"""The likely cause of an error that a learner's function raised, by what the error's own line says.

torch names the shapes that do not fit, Python the name that is missing. What the learner has to change is often one
step further, and the same few mistakes come again in all exercises. Where none is found, the error's line has to do.
"""

from __future__ import annotations

import re

from fsdplab.sessions.worker.collective_hooks import NoSuchRank

_NONE_HERE = (
    "in some case None stands before the dot or the bracket, or in the loop, of this line: ask before, `is not None`"
)
_FEWER_DIMENSIONS = (
    "a shape has a number for each dimension, and in this case the tensor has fewer: `x.shape[1:]` is what follows the"
    " first one, however many there are"
)
OTHERWISE = "read the last line first: it names the error; the line above is yours"
NOTHING = "the function returns nothing: end it with `return ...`"
DOTS = "the stub's dots are still there: write a value in place of the dots"
_CAUSES = (  # (what the error's line says, the likely cause), the first that fits
    (r"hooks? should return None", "a hook returns nothing: it changes `parameter.grad` itself"),
    (
        r"no attribute '(no_sync|clip_grad_norm_)'",
        "that is a method of FSDP1's wrapper, and `fully_shard` has none: `model.set_requires_gradient_sync(False)` and"
        " `torch.nn.utils.clip_grad_norm_(model.parameters(), ...)`",
    ),
    (
        r"mixed torch.Tensor and DTensor",
        "some parameters are sharded and others are whole: `fully_shard(model)` after the blocks, so that no parameter"
        " is left over",
    ),
    (
        r"Invariant encountered: value was None",
        "inner modules are sharded before those that hold them: `fully_shard` on every block first, on the model last;"
        " and of a model that is cut over another axis already, each call needs its `mesh=...`",
    ),
    (
        r"leaf Variable that requires grad",
        "values of parameters are written outside of autograd: under `torch.no_grad()`, or into `parameter.detach()`",
    ),
    (
        r"Cannot copy out of meta tensor",
        "on the meta device there are no values to move: `model.to_empty(device=...)` gives memory, values are read"
        " afterwards",
    ),
    (
        r"can only be applied to a module once",
        "this module is sharded already: a call in a loop, or a second one, shards it again. One call for each module",
    ),
    (r"Unreadable: NoneType", NOTHING),
    (
        r"class '(int|float)'> instead|must be Tensor, not (int|float)",
        "a plain number stands where a tensor is expected: `torch.tensor(x)` makes one. `sum` of nothing is the number"
        " 0, so begin with a tensor, `torch.zeros(())`",
    ),
    (
        r"Expected parameter `\w+` of type (?!.*NoneType)",
        "a tensor stands where a list of tensors belongs, or the other way round: what is written to comes first, then"
        " what is sent",
    ),
    (r"KeyError", "there is no such key: the keys are those in the stub and the statement, or ask `list(...)` of it"),
    (
        r"modified by an inplace operation",
        "autograd keeps the parameters that the forward used, and takes a copy into one for a change of its value:"
        " write through `whole.data`, which it does not follow",
    ),
    (
        r"Unreadable: Net: .*storage of size 0",
        "a backward computes with the same tensors that its forward used, and one has no memory: unshard these before"
        " a unit's backward, a frozen unit's too, and reshard them when its backward is done, not when it begins",
    ),
    (
        r"local_tensor argument only accepts torch.Tensor but got .*DTensor",
        "an earlier call has sharded this one: leave alone what is a DTensor",
    ),
    (r"Unreadable: \S+ RuntimeError", "the error came when what it returned was used; the error's own words say why"),
    (r"Unreadable", "what it returned is of another type than the statement asks for"),
    (
        NoSuchRank.__name__,
        "the ring is not closed: after the last rank comes rank 0, and before rank 0 the last one, so take"
        " `(rank + 1) % n` and `(rank - 1) % n`",
    ),
    (
        r"NameError.*'(rank|world_size)'",
        "`rank` and `world_size` are there in `%%ranks` cells only: ask `dist.get_rank()` and `dist.get_world_size()`",
    ),
    (
        r"NameError",
        "the cell is saved as a file of its own and runs on other processes: it needs its own imports and helpers, and"
        " everything else comes in the function's arguments, under the names that they have in its first line",
    ),
    (
        r"UnboundLocalError",
        "an assignment inside a function makes the name local to it: change the object itself (a list by `.clear()` and"
        " `.append(...)`), or declare the name `nonlocal`",
    ),
    (r"hooks returned NoneType", NOTHING),
    (
        r"NoneType",
        "something is None here. A collective writes into the tensor that it is given and returns None, so go on with"
        " that tensor; and a `.grad` is None until somebody sets it",
    ),
    (
        r"'(builtin_function_or_method|method|function)'",
        "a function is handed over and not called: `name()` calls it, `name` alone is the function itself",
    ),
    (
        r"assign a gradient of size|assigned grad has data of a different size",
        "a gradient has the shape of what it belongs to: a parameter's is whole (`piece.view_as(parameter)`), a slice's"
        " has the slice's rows only, as a reduce-scatter leaves them",
    ),
    (
        r"stack expects a non-empty TensorList",
        "the list is empty in this case, and there is nothing to stack: a sum that begins with `torch.zeros(())` has a"
        " value then, too",
    ),
    (
        r"is shared with a parameter already managed",
        "a weight that two modules share would be cut by two units. Choose one unit for both: a list,"
        " `fully_shard([a, b])`, or no call for either, and the call for the model takes them",
    ),
    (
        r"expected a non-empty list of Tensors",
        "the list is empty here: this was called before anything was ready, or once more when all had left, so ask"
        " before whether there is anything; or a rank has nothing to send, and joins it with an empty tensor,"
        " `x.new_empty(0)`",
    ),
    (
        r"same number of dimensions",
        "matrices and biases cannot be joined as they are: flatten each one before, and `view_as` it afterwards",
    ),
    (
        r"storage of size 0",
        "this tensor has a shape and no memory: nothing can be cut from it or written into it before its storage is"
        " resized",
    ),
    (
        r"different dtypes|invalid tensor type at index|Check failed: .*dtype\(\)",
        "all tensors of a collective have one dtype, and one made without is float32: make it like what is sent,"
        " `x.new_empty(...)` or `torch.empty_like(x)`",
    ),
    (
        r"invalid tensor size at index|Check failed: .*sizes\(\)|must have the same (size|shape)",
        "all blocks of a collective have one shape: pad the short ones, and leave the padding out afterwards; or the"
        " whole stands where a rank's own part belongs",
    ),
    (
        r"size of tensor a .* must match .* dimension [1-9]",
        "the rows of the two sides have other lengths: were they joined next to each other, and not below each other?"
        " `torch.cat(...)` alone joins rows",
    ),
    (
        r"expanded size of the tensor .* must match the existing size",
        "what is written has another size than the part that it is written into: `x[: len(rows)] = rows` takes as much"
        " as there is",
    ),
    (
        r"failed to unpack the object",
        "a shape stands where single sizes are expected: a star hands them over one by one, `x.new_zeros(c,"
        " *x.shape[1:])`",
    ),
    (
        r"expected length \d+, got \d+",
        "the list has one tensor for each rank, and there are `dist.get_world_size()` ranks",
    ),
    (
        r"missing \d+ required positional argument",
        "this call lacks an argument, which the error names",
    ),
    (
        r"size of tensor a .* must match",
        "the two sides have different rows: padding that was not left out, or rows that are missing; compare the two"
        " numbers with the rows and with n * c. Or one side is flat, and `view_as` gives it the other's shape",
    ),
    (
        r"takes exactly one argument|slice indices must be integers|first arg must be str or a tuple",
        "several things stand where one is expected: a pair in parentheses is one, `steps.append((a, b))`, and so is a"
        " tuple of endings, `name.endswith((a, b))`",
    ),
    (
        r"list index out of range",
        "behind a list's last place there is nothing, and a slice, `a[i:j]`, may end there. In this case there are"
        " fewer than this index says: another list may be longer, and `torch.chunk` and `split` may give fewer pieces"
        " than ranks",
    ),
    (
        r"IndexError.*index out of range",
        "there are fewer pieces, or fewer dimensions, than this index: `torch.chunk` and `split` give fewer pieces than"
        " ranks where the rows (with `dim=1` the columns) run out, and a tensor may have one dimension only",
    ),
    (
        r"after before_backward: unit root ",
        "the root stays from forward to backward: after_forward reshards the blocks alone, `if not unit.is_root:`, and"
        " then its backward need not unshard it again",
    ),
    (
        r"after before_(forward|backward): ",
        "the hook has run and the unit still has no memory: both hooks that come before a use call"
        " `unshard(unit.mine, unit.whole)`, unless the unit stayed unsharded; and `hooks` returns the four in the"
        " stub's order",
    ),
    (
        r"take_gradient\(\) comes after",
        "autograd has left nothing yet, or it was taken already: once for each unit, in after_backward, which `hooks`"
        " returns as the last of the four, without calling it",
    ),
    (
        r"was called with other arguments; write",
        "a hook hands over the unit's own tensors, in the order of the function's parameters: the slice, then the"
        " whole",
    ),
    (
        r"hooks returned .* return before_forward",
        "`hooks` returns the four functions themselves, not what they return: `return before_forward, after_forward,"
        " before_backward, after_backward`",
    ),
    (
        r"is never called, so nothing would unshard it",
        "this module only holds others and is never called itself: choose the modules in it",
    ),
    (
        r"default process group twice",
        "the ranks have a group already when your function is called: leave `init_process_group` out",
    ),
    (
        r"Pair is not connected",
        "a rank names itself in send or recv: `dst` and `src` are other ranks, and differ from rank to rank",
    ),
    (
        r"Connection (reset|closed) by peer",
        "a rank still waits in a call that this one has left behind: every rank makes the same collective calls, so no"
        " `if rank == 0` around one",
    ),
    (r"but got <class '", "a tensor is expected in this place, and something else was handed over"),
    (
        r"unexpected keyword argument",
        "this function has no argument of that name: `help(...)` in a cell lists those that it has",
    ),
    (
        r"not enough arguments for format|not all arguments converted|Replacement index",
        "the text has another number of places than there are values for it; behind `%` several stand in parentheses",
    ),
    (r"can only concatenate str", "a number is joined to a text: `str(number)` makes it one, and so does an f-string"),
    (
        r"ZeroDivisionError",
        "what is divided by is 0 in one of the cases: ask before you divide, and think of what holds there",
    ),
    (
        r"split_with_sizes expects",
        "the pieces do not add up to the whole: of a flat tensor a piece has `numel()` elements (`len` counts rows)",
    ),
    (r"'dict' object has no attribute", "what stands in a dict is read by its key: `row[\"name\"]`, not `row.name`"),
    (
        r"'(tuple|list)' object has no attribute",
        "the items of a tuple or a list have no names: `first, second = pair`, or `pair[0]`",
    ),
    (r"(?i)timed out|timeout", "a rank waited for a message that no rank sent"),
    (
        r"(max|min)\(\).* empty",
        "there is nothing to choose from in this case: say what is to come then, `max(..., default=...)`",
    ),
    (
        r"invalid literal for int\(\)",
        "the text is no number as a whole: take the part of it that is, with `split` or `removeprefix`, and only of"
        " names that have one",
    ),
    (
        r"Split sizes doesn't match",
        "the sizes do not add up to the tensor: the first list says how many elements come from each rank, and adds up"
        " to what receives them; the second how many go to each, and adds up to what is sent",
    ),
    (
        r"alltoallv.*inLengthPerRank\[myRank\]",
        "a rank sends itself another number of elements than it expects from itself: what goes to each rank is as long"
        " as what that rank expects, so see which rows go where, and compare the two lists of sizes",
    ),
    (
        r"alltoall.*size % context",
        "without sizes all blocks are equally long: say how many elements come from each rank, and how many go to each",
    ),
    (
        r"shape '.*' is invalid for input of size",
        "this many elements do not make that shape: whose rows and columns are these?",
    ),
    (
        r"'(int|float)' object is not (iterable|subscriptable)",
        "a number stands where several are needed: a pair is one argument, `f((a, b))` or `f(pair)`, and a loop over a"
        " number is `range(number)`",
    ),
    (
        r"IndentationError|TabError",
        "this line does not begin in the column of its block: the lines of one block stand below each other, those that"
        " belong to a `def`, `if` or loop four spaces further in",
    ),
    (
        r"SyntaxError",
        "Python cannot read this line, or the end of the one before: see whether a comma, a colon or a closing bracket"
        " or quote is missing. In a dict an entry is `key: value`, with `=` it is `dict(key=value)`",
    ),
    (r"[Ee]llipsis", DOTS),
    (
        r"'float' object cannot be interpreted as an integer",
        "a whole number is needed here, and this one was made by `/`: `//` divides whole numbers, `int(...)` cuts off",
    ),
    (
        r"process group has not been initialized",
        "this function runs without ranks: what it needs to know stands in its arguments",
    ),
    (
        r"values to unpack",
        "this line has a fixed number of names, and in this case there are more or fewer values: go through them in a"
        " loop, which takes any number. A loop over `parameters()` has one value a round, `named_parameters()` two",
    ),
    (
        r"takes \d+ positional arguments? but \d+ (was|were) given",
        "this function takes fewer arguments: several things can be handed over as one list, `f([a, b])`, and some only"
        " by their names, `f(a, name=b)`",
    ),
    (
        r"optimizer.* was built before the model was sharded",
        "sharding replaces the parameters: build the optimizer behind the call that shards, and take the parameters for"
        " it from the model there, too",
    ),
    (
        r"optimizer got an empty parameter list",
        "nothing is left to train: no name, or no `requires_grad`, meets the condition; print the names that do",
    ),
    (r"'Parameter' object has no attribute", "a parameter stands where a module is expected: the one that holds it"),
    (
        r"Invoked with: .*ProcessGroup",
        "the group stands where another argument belongs (after the tensor comes the operation): name it, `group=...`",
    ),
    (
        r"Invoked with",
        "an argument is of another type than this call takes: after the tensors comes `op=`; a number of ranks is none",
    ),
    (
        r"is not part of group",
        "`src` and `dst` are numbers among all ranks, and this one is not in the group. Where each rank of the group"
        " needs the result, no single rank is named: `all_reduce`, `all_gather`",
    ),
    (
        r"Cannot concatenate overlapping meshes",
        "these parameters are cut over this axis already: by tensor parallelism (`fully_shard` gets the other axis"
        " alone, `mesh[...]`), or by the module that holds them (`fully_shard` on every block first, the model last)",
    ),
    (
        r"Cannot distribute a DTensor with device mesh",
        "what is cut here is sharded already: cut the layers first, while their parameters are whole, and shard what is"
        " left",
    ),
    (
        r"AttributeError: .* object has no attribute",
        "this object has nothing of that name: take the names that the statement and the stub use, or the object that"
        " is meant (a part was taken for the whole, or the whole for a part)",
    ),
)  # fmt: skip


def cause_of(error: str, pure: bool = False, line: str = "") -> str:
    """The likely cause behind the last line of a traceback: `cause_of("NameError: name 'torch' is not defined")`; a
    `pure` function calls no collective, and `line` is the learner's line that raised it.
    """
    if "tuple index out of range" in error and re.search(r"\.(shape|size\(\))\[", line):
        return _FEWER_DIMENSIONS
    if pure and "Unreadable" not in error and re.search(r"'NoneType' object (has no attribute|is not)", error):
        return _NONE_HERE
    return next((cause for says, cause in _CAUSES if re.search(says, error)), OTHERWISE)
