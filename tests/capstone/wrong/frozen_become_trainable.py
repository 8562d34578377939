"""20.shards: a frozen parameter's shard is frozen too"""


def own_parameters(module):
    for owner in list(module.modules()):
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None and not isinstance(parameter, DTensor):
                yield owner, name, parameter.requires_grad_(True)
