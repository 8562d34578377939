"""One file a feature beside the core; begin with the one that you look for.

Offload (offload, mapped, offloaded_optimizer), recomputation of activations, clipping, checked files of checkpoints,
and checks of misuse.
"""
