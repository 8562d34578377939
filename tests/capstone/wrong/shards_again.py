"""20.shards: an earlier call has sharded this one"""


def own_parameters(module):
    for owner in list(module.modules()):
        for name, parameter in list(owner._parameters.items()):
            yield owner, name, parameter
