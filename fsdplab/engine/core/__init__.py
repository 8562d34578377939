"""Units, the order of a step, and the tensors that they act on; begin with unit.py and step.py.

A file imports only files above it in this list. Those of the first line need no torch: plans are made with them too.

    layout, owners, pending, unit, step
    policy, average, buffers, transport, placement, param, parted, plan, fewer_ranks, memory, hooks
"""
