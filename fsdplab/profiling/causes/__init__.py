"""Causes of a slow step: each file has what its rules claim, and at its end their rows; `findings.py` has the order."""
