"""What EAGLE-3 and MTP share: drafting token by token over (next token, feature) pairs.

A small network of one or a few layers runs over *entries*. Entry j pairs the token
t_{j+1} with the target's feature f_j of the position before it, and predicts t_{j+2};
the first token of a text has no entry. With the anchor at position n a draft begins
with the pair (t_n, f_{n-1}), and then feeds each drafted token together with the
network's own last output in place of a feature. Entries made so are guesses: they are
trimmed after the draft, and made again from the target's features where the tokens were
accepted. Tokens that have no entry yet are *owed*, and fed in one call with the
anchor at the next draft. A draft of w tokens is w calls of the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from ..model.rows import Rows
from .draw import BlockSampler, peak_logits
from .proposer import Draft, DraftRow, ProposerSpec
from .rates import PeakRate

# Owed tokens after which they are fed without a draft, so that a long plain stretch does not
# end in one long call.
MOST_OWED = 64


class ChainNetwork(Protocol):
    """A network over pairs. Shapes: B rows, L entries, F feature width, H hidden width."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose outputs, concatenated, are a feature ``(F,)``."""
        ...

    @property
    def block(self) -> int:
        """Most tokens of a draft."""
        ...

    @property
    def feature_size(self) -> int: ...

    @property
    def kv_bytes_per_token(self) -> float: ...

    @property
    def draft_to_target(self) -> mx.array | None:
        """``(Vd,)`` target id of every draft id; None when they are the same ids."""
        ...

    def make_rows(self) -> Rows:
        """An empty row of its own KV caches."""
        ...

    def from_features(self, features: mx.array) -> mx.array:
        """The target's features ``(B, L, F)`` as inputs ``(B, L, H)``."""
        ...

    def run(self, tokens: mx.array, inputs: mx.array, rows: Rows) -> mx.array:
        """Entries ``tokens (B, L)`` with ``inputs (B, L, H)``: outputs ``(B, L, H)``, cached."""
        ...

    def fed_back(self, out: mx.array) -> mx.array:
        """The input made of an output, both ``(B, H)``."""
        ...

    def logits(self, out: mx.array) -> mx.array:
        """Logits ``(B, Vd)`` of outputs ``(B, H)``."""
        ...


@dataclass
class ChainRow:
    """One row: entries for its first tokens, the tokens that owe one, and their features.

    ``features (1, len(owed) + 1, F)`` begin at the feature the first owed token is paired
    with; the last is *open*: its partner is the anchor. None for an empty text.
    """

    rows: Rows
    owed: list[int]
    features: mx.array | None = None

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + (0 if self.features is None else self.features.nbytes)

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.rows.arrays, *([] if self.features is None else [self.features])]

    def extract(self, row: int) -> ChainRow:
        return ChainRow(self.rows.extract(row), list(self.owed), self.features)

    def can_trim_to(self, row: int, length: int) -> bool:
        return True  # its layers have no windows


class ChainProposer:
    """The proposer interface over a ``ChainNetwork``, for a target of ``vocab_size`` ids."""

    def __init__(self, name: str, network: ChainNetwork, vocab_size: int) -> None:
        self.network = network
        self.spec = ProposerSpec(
            name=name,
            block=network.block,
            taps=network.taps,
            keeps_state=True,
            samples_drafts=True,
            confidence="peak",
            kv_bytes_per_token=network.kv_bytes_per_token,
        )
        self._vocab_size = vocab_size
        self._rows = Rows([], 0)
        self._owed: list[list[int]] = []
        self._features: list[mx.array | None] = []  # per row, as in ``ChainRow``
        self._new: mx.array | None = None  # of the round under way, (B, W, F)
        self._drafted = False  # in the round under way
        self._peaks = PeakRate()

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes + sum(f.nbytes for f in self._features if f is not None)

    # -- a row that is being prefilled, or waits to be reused --------------------------

    def new_row(self) -> ChainRow:
        return ChainRow(self.network.make_rows(), [])

    def prefill(
        self, row: ChainRow, tokens: Sequence[int], features: mx.array | None
    ) -> list[mx.array]:
        if features is None:
            raise ValueError("the drafter needs the target's features")
        owed = [*row.owed, *(tokens if row.features is not None else tokens[1:])]
        features = _joined(row.features, features)
        if owed:
            self._feed(row.rows, [owed], [features[:, :-1]])
        row.owed, row.features = [], mx.contiguous(features[:, -1:])
        return row.arrays

    def row_length(self, row: ChainRow) -> int:
        return _length(row.rows.lengths[0], row.features)

    def trim_row(self, row: ChainRow, length: int) -> None:
        entries = row.rows.lengths[0]
        if row.features is None or length >= self.row_length(row):
            return
        if length > entries:
            row.owed = row.owed[: length - entries - 1]
            row.features = row.features[:, : length - entries]
            return
        # The feature that is open now went into an entry and is gone. A zero takes its place:
        # one entry of a reused prompt is then weaker, and no text changes.
        row.rows.trim_to([max(length - 1, 0)])
        row.owed, row.features = [], mx.zeros_like(row.features[:, :1]) if length else None

    # -- the rows being decoded --------------------------------------------------------

    def extend(self, row: ChainRow) -> None:
        if len(self._rows):
            self._rows.extend(row.rows)
        else:
            self._rows = row.rows
        self._owed.append(row.owed)
        self._features.append(row.features)

    def filter(self, rows: Sequence[int]) -> None:
        if rows:
            self._rows.filter(rows)
        else:
            self._rows = Rows([], 0)
        self._owed = [self._owed[r] for r in rows]
        self._features = [self._features[r] for r in rows]
        self._new, self._drafted = None, False
        self._peaks.forget()

    def extract(self, row: int) -> ChainRow:
        return ChainRow(self._rows.extract(row), list(self._owed[row]), self._features[row])

    def peek(self, anchors: Sequence[int]) -> list[tuple[float, ...] | None]:
        return [None] * len(anchors)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        width = max(row.width for row in rows)
        net, ids_of = self.network, self.network.draft_to_target
        sampler = BlockSampler(rows, self._vocab_size, ids_of)
        # Entries that stay: one per position of the context, the anchor's being the last.
        stay = [_length(n, f) for n, f in zip(self._rows.lengths, self._features, strict=True)]
        fed = [[*owed, row.anchor] for owed, row in zip(self._owed, rows, strict=True)]
        none = mx.zeros((1, 1, net.feature_size))  # the first token of a text has no partner
        features = [none if f is None else f for f in self._features]
        out = self._feed(self._rows, fed, features)  # (B, H)
        tokens, slots = [], []
        for k in range(width):
            slots.append(net.logits(out))
            drawn = sampler(slots[-1], k).astype(mx.int32)
            tokens.append(drawn if ids_of is None else ids_of[drawn])
            if k < width - 1:
                out = net.run(tokens[-1][:, None], net.fed_back(out)[:, None], self._rows)[:, 0]
        self._rows.trim_to(stay)
        self._owed, self._features = [[] for _ in rows], [None] * len(rows)
        self._drafted = True
        peaks = peak_logits(mx.stack(slots, axis=1))
        return Draft(
            tokens=mx.stack(tokens, axis=1),
            counts=tuple(row.width for row in rows),
            confidence=self._peaks.of_draft(peaks, [row.params.greedy for row in rows]),
            q=sampler.distributions(),
            peaks=peaks,
        )

    def append_features(self, features: mx.array | None) -> list[mx.array]:
        if features is None:
            raise ValueError("the drafter needs the target's features")
        if max(map(len, self._owed), default=0) >= MOST_OWED:
            none = mx.zeros((1, 0, self.network.feature_size))
            fed = [none if f is None else f[:, :-1] for f in self._features]
            self._feed(self._rows, self._owed, fed)
            self._owed = [[] for _ in self._owed]
            self._features = [f if f is None else mx.contiguous(f[:, -1:]) for f in self._features]
        self._new = features
        return [features, *self._rows.arrays, *self._peaks.arrays]

    def commit(
        self,
        context: Sequence[Sequence[int]],
        verified: Sequence[int],
        accepted: Sequence[int],
    ) -> None:
        self._peaks.commit(verified, accepted)
        new, self._new = self._new, None
        drafted, self._drafted = self._drafted, False
        assert new is not None
        for r, tokens in enumerate(context):  # ``tokens`` begins with the anchor
            # The anchor has its entry from the draft, or is a text's first token and has none.
            paired = drafted or self._features[r] is None
            self._owed[r] += tokens[1:] if paired else tokens
            self._features[r] = _joined(self._features[r], new[r : r + 1, : len(tokens)])

    # -- inside ------------------------------------------------------------------------

    def _feed(
        self, rows: Rows, tokens: Sequence[Sequence[int]], features: Sequence[mx.array]
    ) -> mx.array:
        """Each row's ``tokens`` with ``features (1, L_r, F)``: its last output, ``(B, H)``."""
        before = list(rows.lengths)
        padded, ends = right_padded(tokens)
        width = padded.shape[1]
        inputs = mx.concatenate(
            [mx.pad(f, [(0, 0), (0, width - f.shape[1]), (0, 0)]) for f in features]
        )
        out = self.network.run(padded, self.network.from_features(inputs), rows)
        rows.trim_to([n + len(row) for n, row in zip(before, tokens, strict=True)])
        return mx.take_along_axis(out, ends, axis=1)[:, 0]


def right_padded(tokens: Sequence[Sequence[int]]) -> tuple[mx.array, mx.array]:
    """Ids ``(B, L)``, and the index ``(B, 1, 1)`` of each row's last."""
    longest = max(map(len, tokens))
    padded = [[*row, *[0] * (longest - len(row))] for row in tokens]
    ends = mx.array([max(len(row) - 1, 0) for row in tokens])
    return mx.array(padded, dtype=mx.int32), ends[:, None, None]


def _length(entries: int, features: mx.array | None) -> int:
    """Context positions of a row: one per entry, and one per feature that is in none."""
    return entries + (0 if features is None else int(features.shape[1]))


def _joined(first: mx.array | None, then: mx.array) -> mx.array:
    return then if first is None else mx.concatenate([first, then], axis=1)
