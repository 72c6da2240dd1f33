"""Drafts: every strategy that proposes tokens, behind one interface.

Read ``proposer`` (the interface), ``lookup`` and ``copying`` (copies of earlier
text), ``dspark/`` (the paper's drafter), ``draft_model`` (a small language model),
``draw`` (how tokens are drawn), ``strategies`` (which folder holds which strategy).
"""

from .proposer import Draft, DraftRow, Proposer, ProposerSpec, RowState

__all__ = ["Draft", "DraftRow", "Proposer", "ProposerSpec", "RowState"]
