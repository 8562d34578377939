"""20.special: unless it is given shape and stride

Right where the ranks divide the rows.
"""


def as_dtensor(local, item, unit):
    return DTensor.from_local(local, unit.mesh, [Shard(0)], run_check=False)
