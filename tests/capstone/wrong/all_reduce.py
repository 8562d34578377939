"""20.backward: one reduce-scatter for each unit

All of the gradient goes to all ranks, which keep their rows: twice the bytes.
"""


def reduce(unit):
    items = [item for item in unit.items if item.train]
    if all(item.full.grad is None for item in items):
        return
    finish_reduction(unit.shared)
    lines = torch.cat([to_lines(item, unit) for item in items], dim=1)
    work = dist.all_reduce(lines, async_op=True)
    unit.shared.reduction = (unit, items, lines, lines[dist.get_rank()], work)
