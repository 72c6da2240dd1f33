"""Proposers: what drafts the tokens that the target verifies."""

from .copying import CopyingProposer, CopyingRow
from .dspark.proposer import DSparkProposer
from .lookup import LookupProposer
from .proposer import Draft, DraftRow, Proposer

__all__ = [
    "CopyingProposer",
    "CopyingRow",
    "DSparkProposer",
    "Draft",
    "DraftRow",
    "LookupProposer",
    "Proposer",
]
