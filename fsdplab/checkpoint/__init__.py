"""Checkpoints of a training: saved whole or not at all, checked before anything is changed, loaded on any ranks.

They stand on `torch.distributed.checkpoint`, know nothing of an engine, and so serve PyTorch's too. state.py saves and
loads one: its optimizer by optimizer.py, other states (schedulers, random numbers) by extra.py, and files.py reads no
file further than it was checked. folder.py keeps those of a job that may be killed, and lock.py lets one job do so.
"""

from fsdplab.common.lazy import names_of_stub

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
