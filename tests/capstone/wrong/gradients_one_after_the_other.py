"""20.backward: line r of the reduce-scatter

The message has each parameter in one piece, not a line for each rank.
"""


def reduce(unit):
    items = [item for item in unit.items if item.train]
    if all(item.full.grad is None for item in items):
        return
    finish_reduction(unit.shared)
    whole = torch.cat([to_lines(item, unit).flatten() for item in items])
    mine = torch.empty(whole.numel() // unit.n)
    unit.shared.reduction = (unit, items, whole, mine, reduce_scatter(mine, whole, async_op=True))
