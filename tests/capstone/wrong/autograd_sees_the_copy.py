"""20.backward: write through `whole.data`"""


def fill(item, values):
    item.full.untyped_storage().resize_(4 * item.numel)
    item.full.detach().copy_(values)
    item.owner._parameters[item.name] = item.full
