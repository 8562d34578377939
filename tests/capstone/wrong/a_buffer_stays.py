"""20.forward: let no buffer outlive its use"""


def copy_out(unit, buffer):
    unit.buffer = buffer
    lines, at = buffer.view(unit.n, -1), 0
    for item in unit.items:
        fill(item, lines[:, at : at + item.each].flatten()[: item.numel].view(item.shape))
        at += item.each
