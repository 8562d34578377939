"""Right answers to the exercises of notebook 08, besides the references."""


def waited__one_part_after_the_other(issued, peer_issued, taken, delivered, needed):
    at = max(issued, needed)
    both = max(at, peer_issued)
    begun = max(both, taken)
    peer = float(both - at) if delivered > at else 0.0
    queue = begun - both if delivered > both else 0
    return dict(peer=peer, queue=queue, link=max(0, delivered - begun))
