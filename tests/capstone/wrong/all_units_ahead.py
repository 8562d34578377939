"""20.forward: every use gathers anew"""


def ahead(unit, order):
    for other in order:
        begin_gather(other)
