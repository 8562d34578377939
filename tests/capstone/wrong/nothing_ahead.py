"""20.overlap: before this unit computes"""


def ahead(unit, order):
    pass
