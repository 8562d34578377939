"""20.overlap: in backward the unit before this one"""


def ahead(unit, order):
    if order is unit.shared.forward and unit in order and order[-1] is not unit:
        begin_gather(order[order.index(unit) + 1])
