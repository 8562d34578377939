"""One parameter's life, flat; begin with unit.py.

A file imports only files above it in this list: policy, layout, pending, packing, shard_storage, transport, placement,
param, unit_config, reduction, unit, schedule, runtime, hooks.
"""
