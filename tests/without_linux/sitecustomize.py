"""Python imports this at its start; what is taken away is in taking.py, which is not imported where nothing is."""

import os

if what := os.environ.get("FSDPLAB_TESTS_TAKE_AWAY"):
    import taking

    taking.take_away(what)
