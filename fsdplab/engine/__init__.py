"""Shards models: `fully_shard`, and `shard_model` for every row of the strategy table.

Begin with core/unit.py and core/step.py: what one unit does, and when. `core/` imports nothing else of the engine but
events.py (what it tells listeners), compat.py (what depends on torch's version) and nested.py (tensors in containers).
`transport/` moves bytes between ranks, `emulation/` slows it down to a network that is not there, `features/` and
`torch_api/` have one file for each thing that a user may ask for besides. module.py and shard.py put them together.
"""

from fsdplab.common.lazy import names_of_stub

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
