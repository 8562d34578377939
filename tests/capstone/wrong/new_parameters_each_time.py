"""20.backward: the optimizer updates something else"""


def free(item):
    item.full.untyped_storage().resize_(0)
    item.shard = nn.Parameter(item.shard.detach().clone(), requires_grad=item.train)
    item.owner._parameters[item.name] = item.shard
