"""20.fully_shard:

The order of units is kept at the top of the file.
"""

SHARED = SimpleNamespace(forward=[], backward=[], now_backward=False, reduction=None)


def adopt_inner_units(module, unit):
    unit.shared = SHARED
    for inner in module.modules():
        if hasattr(inner, "fsdp_unit"):
            inner.fsdp_unit.root = inner is module
