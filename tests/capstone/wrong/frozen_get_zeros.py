"""20.special: a frozen parameter gets no gradient"""


def reduce(unit):
    finish_reduction(unit.shared)
    lines = torch.cat([to_lines(item, unit) for item in unit.items], dim=1)
    mine = torch.empty(lines.shape[1])
    unit.shared.reduction = (unit, unit.items, lines, mine, reduce_scatter(mine, lines.flatten(), async_op=True))
