"""20.overlap: has arrived only once `wait()`

The gather is read at once; on a fast machine it has often arrived.
"""


def finish_gather(unit):
    begin_gather(unit)
    if unit.gather is not None:
        (buffer, work), unit.gather = unit.gather, None
        while not work.is_completed():
            pass
        copy_out(unit, buffer)
    unit.whole = True
