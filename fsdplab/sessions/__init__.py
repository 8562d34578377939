"""Turns a RunSpec into a RunRecord: real ranks, one report when they fail, and no process left behind.

The names load when they are first used, because every rank and every launcher imports this file: each would wait for
what is imported here.
"""

from fsdplab.common.lazy import names_of_stub

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
