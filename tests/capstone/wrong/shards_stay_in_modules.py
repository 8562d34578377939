"""20.forward: a unit computes with whole parameters"""


def fill(item, values):
    item.full.untyped_storage().resize_(4 * item.numel)
    item.full.data.copy_(values)
