"""The newest that is whole

A job looks into its folder after a crash. Write newest(folder): the step of the newest checkpoint that can be loaded,
0 for none. `folder` has the names of its entries, each with the names and sizes of its files, and with the sizes that
its manifest lists: `{"step-8": {"files": {"rank0": 100}, "manifest": {"rank0": 100}}}`; no manifest is None.

1. Which names are checkpoints at all? A save that is not finished begins with a dot.
2. What says that all files are there, and whole?
3. Numbers are compared as numbers: step-10 is newer than step-8. Without any: 0.
"""


def newest(folder):
    """The step of the newest whole checkpoint; 0 where there is none."""
    steps = []
    ### BEGIN SOLUTION  which entries are whole? which of these is the newest?
    for name, entry in folder.items():
        whole = entry["files"] == entry["manifest"]
        if whole and name.startswith("step-"):
            steps.append(int(name.split("-")[1]))
    return max(steps, default=0)
    ### END SOLUTION


# ---- check: pure


def cases(rank, n):
    files = {"rank0": 100, "rank1": 96}
    whole = {"files": files, "manifest": files}
    yield "two whole ones", {"step-4": whole, "step-8": whole}
    yield "in another order", {"step-8": whole, "step-4": whole}
    yield "one of two digits", {"step-12": whole}
    yield "step 10 after step 8", {"step-8": whole, "step-10": whole}
    yield "a save that is not finished", {"step-4": whole, ".step-8": whole}
    cut = {"rank0": 100, "rank1": 7}
    yield "a file that was cut short", {"step-4": whole, "step-8": {"files": cut, "manifest": files}}
    long = {"rank0": 100, "rank1": 97}
    yield "a file that is too long", {"step-4": whole, "step-8": {"files": long, "manifest": files}}
    yield "a file that is lost", {"step-4": whole, "step-8": {"files": {"rank0": 100}, "manifest": files}}
    yield "no manifest", {"step-4": whole, "step-8": {"files": files, "manifest": None}}
    yield "the older one was cut short", {"step-4": {"files": cut, "manifest": files}, "step-8": whole}
    longer = {"rank0": 109, "rank1": 87}
    yield "as many bytes, in other files", {"step-4": whole, "step-8": {"files": longer, "manifest": files}}
    yield "nothing", {}


def observe(newest, folder):
    return {"step": newest(folder), "_folder": folder}


def said(got, right):
    step, folder = got["step"], got["_folder"]
    if not isinstance(step, int):
        return "return the step of one checkpoint as a number, such as 8: no name, no list"
    if not right["step"]:
        return "nothing here can be loaded: that is 0"
    if not step:
        return f"step-{right['step']} is whole and can be loaded, whatever the others are"
    if f"step-{step}" not in folder:
        return f"there is no step-{step} here: the step is the whole number behind `step-`"
    if lack := lacks(**folder[f"step-{step}"]):
        return f"step-{step} cannot be loaded: {lack}"
    return f"step-{right['step']} is whole, too, and newer"


def lacks(files, manifest):
    """Why a checkpoint is not whole; nothing where it is."""
    if manifest is None:
        return "it has no manifest"
    unlike = [file for file, size in manifest.items() if files.get(file) != size]
    return (
        f"its manifest says {manifest[unlike[0]]} bytes of {unlike[0]}, there are {files.get(unlike[0], 'none')}"
        if unlike
        else ""
    )


SAYS = {"step": said}
