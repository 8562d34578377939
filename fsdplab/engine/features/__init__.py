"""One file a feature beside the core; begin with the one that you look for.

Offload (offload, mapped, offloaded_optimizer), optimizers of whole matrices (matrix_optimizer, matrix_exchange),
recomputation of activations, clipping, and checks of misuse.
"""
