"""The statements by subject, in the order in which the notebook asks them: `CLAIMS` has all, `claim_of("C6")` one."""

from __future__ import annotations

from . import memory, practice, speed, traffic
from .claim import CONDITIONAL, CONFIRMED, REFUTED, VERDICTS, Claim, Finding

__all__ = ["CLAIMS", "CONDITIONAL", "CONFIRMED", "REFUTED", "VERDICTS", "Claim", "Finding", "claim_of"]

CLAIMS: tuple[Claim, ...] = (*memory.CLAIMS, *traffic.CLAIMS, *speed.CLAIMS, *practice.CLAIMS)


def claim_of(number: str) -> Claim:
    """The claim of a number; KeyError for an unknown one."""
    return next(claim for claim in CLAIMS if claim.id == number)
