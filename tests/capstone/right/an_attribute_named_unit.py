"""The modules' own attributes have names that a learner may take too."""


def adopt_inner_units(module, unit):
    for inner in module.modules():
        if hasattr(inner, "unit"):
            inner.unit.shared, inner.unit.root = unit.shared, False
    module.unit = unit
