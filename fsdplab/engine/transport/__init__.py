"""How shards and gradients are sent, behind the one interface of core/transport.py; begin in selection.py.

staged.py (NCCL), gloo.py and shared_memory/ are its forms; streams.py says who waits for a collective.
"""
