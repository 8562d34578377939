"""Collectives over lists of tensors, not one flat tensor."""


def begin_gather(unit):
    if unit.whole or unit.gather is not None:
        return
    locals_ = [item.shard.to_local().detach().flatten() for item in unit.items]
    line = torch.cat([pad(local, (0, item.each - len(local))) for local, item in zip(locals_, unit.items)])
    buffer = torch.empty(unit.n * line.numel())
    unit.gather = (buffer, dist.all_gather(list(buffer.chunk(unit.n)), line, async_op=True))
