"""Proposers: what drafts the tokens that the target verifies."""

from .base import Draft, DraftRow, Proposer
from .copying import CopyingProposer, CopyingRow
from .dspark import DSparkProposer
from .lookup import LookupProposer

__all__ = [
    "CopyingProposer",
    "CopyingRow",
    "DSparkProposer",
    "Draft",
    "DraftRow",
    "LookupProposer",
    "Proposer",
]
