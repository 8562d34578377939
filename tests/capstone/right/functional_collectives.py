"""Functional collectives: their results wait for themselves."""

import torch.distributed._functional_collectives as functional


def begin_gather(unit):
    if unit.whole or unit.gather is not None:
        return
    locals_ = [item.shard.to_local().detach().flatten() for item in unit.items]
    line = torch.cat([pad(local, (0, item.each - len(local))) for local, item in zip(locals_, unit.items)])
    unit.gather = functional.all_gather_tensor(line, 0, dist.group.WORLD)


def finish_gather(unit):
    begin_gather(unit)
    if unit.gather is not None:
        buffer, unit.gather = functional.wait_tensor(unit.gather), None
        copy_out(unit, buffer)
    unit.whole = True
