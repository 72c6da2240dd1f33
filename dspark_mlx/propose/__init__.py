"""Proposers: what drafts the tokens that the target verifies."""

from .base import Draft, DraftRow, Proposer
from .dspark import DSparkProposer
from .lookup import LookupProposer

__all__ = ["DSparkProposer", "Draft", "DraftRow", "LookupProposer", "Proposer"]
