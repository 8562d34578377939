"""20.forward: every use unshards anew"""


def ahead(unit, order):
    for other in order:
        begin_gather(other)
