"""Wrong answers to the exercises of notebook 08, written from their statements alone."""


def waited__whole_milliseconds(issued, peer_issued, taken, delivered, needed):
    span = lambda a, b: int(max(0, b - max(a, needed)))
    second = max(issued, peer_issued)
    return {"peer": span(issued, second), "queue": span(second, taken), "link": span(taken, delivered)}


def waited__in_seconds(issued, peer_issued, taken, delivered, needed):
    span = lambda a, b: max(0, b - max(a, needed)) / 1000
    second = max(issued, peer_issued)
    return {"peer": span(issued, second), "queue": span(second, taken), "link": span(taken, delivered)}


def waited__a_peer_that_was_there(issued, peer_issued, taken, delivered, needed):
    span = lambda a, b: max(0, b - max(a, needed))
    second = max(issued, peer_issued)
    return {"peer": abs(peer_issued - issued), "queue": span(second, taken), "link": span(taken, delivered)}


def waited__what_lies_before(issued, peer_issued, taken, delivered, needed):
    second = max(issued, peer_issued)
    span = lambda a, b: max(0, min(b, needed) - a)
    return {"peer": span(issued, second), "queue": span(second, taken), "link": span(taken, delivered)}


def waited__the_link_from_when_both_have_issued(issued, peer_issued, taken, delivered, needed):
    both = max(issued, peer_issued)
    spans = {"peer": (issued, both), "queue": (both, taken), "link": (both, delivered)}
    return {name: max(0, end - max(start, needed)) for name, (start, end) in spans.items()}
