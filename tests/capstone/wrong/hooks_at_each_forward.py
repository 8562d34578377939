"""20.forward: once, in `fully_shard`"""


def before_forward(unit, args):
    finish_gather(unit)
    unit.module.register_forward_hook(lambda module, args, output: release(unit))
