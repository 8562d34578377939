"""The search of `fsdplab plan fit`: axes.py has what is varied, candidates.py what fits, answers.py what is chosen."""

from .answers import Fit, Pick, fit

__all__ = ["Fit", "Pick", "fit"]
