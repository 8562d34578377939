"""Python imports this at its start; what is taken away is in taking.py, which is not imported where nothing is."""

import os
import sys

# a second time where a recorded job's own sitecustomize, which a test imports, runs the one that it hides
if (what := os.environ.get("FSDPLAB_TESTS_TAKE_AWAY")) and "taking" not in sys.modules:
    import taking

    taking.take_away(what)
