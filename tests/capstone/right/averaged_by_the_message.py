"""The reduce-scatter averages."""


def reduce(unit):
    items = [item for item in unit.items if item.train]
    if all(item.full.grad is None for item in items):
        return
    finish_reduction(unit.shared)
    lines = torch.cat([to_lines(item, unit) for item in items], dim=1)
    mine = torch.empty(lines.shape[1])
    work = reduce_scatter(mine, lines.flatten(), op=dist.ReduceOp.AVG, async_op=True)
    unit.shared.reduction = (unit, items, lines, mine, work)


def averaged(mine, unit):
    return mine
