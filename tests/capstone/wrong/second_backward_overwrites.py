"""20.fully_shard: add up until `zero_grad`"""


def set_gradient(item, rows, unit):
    item.shard.grad = as_dtensor(rows, item, unit)
