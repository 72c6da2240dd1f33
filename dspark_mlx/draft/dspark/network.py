"""The DSpark drafter: backbone, sequential head and confidence head as one module.

Attribute names are DeepSpec's tensor names. Everything here is lazy: nothing is
evaluated, so that a whole round stays one graph. Token ids go in and out in the
target's vocabulary; logits are over the draft vocabulary, which is smaller when
the checkpoint has one. Which tokens are drawn is the caller's sampler's business;
what happens to the draft afterwards is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ...errors import CacheError, PairingError
from ...model.cache import RowsKV
from .backbone import DraftLayer
from .calibration import DraftCalibration
from .confidence import ConfidenceHead
from .config import DrafterConfig
from .heads import make_head

Sampler = Callable[[mx.array, int], mx.array]
"""``(logits (B, Vd) of slot k, k)`` to ids in the draft vocabulary ``(B,)``."""


@dataclass(frozen=True)
class DraftOutput:
    """One drafted block: G slots a row, slot k proposing the (k+1)-th token after the anchor."""

    tokens: mx.array
    """``(B, G)`` ids in the target's vocabulary."""
    draft_ids: mx.array
    """``(B, G)`` the same tokens as columns of ``logits``."""
    logits: mx.array
    """``(B, G, Vd)`` after the sequential head: what each token was drawn from."""
    hidden: mx.array
    """``(B, G, H)`` after the final norm."""
    confidence_logits: mx.array | None
    """``(B, G)`` float32, before calibration and sigmoid; None without a confidence head."""


@dataclass(frozen=True)
class BlockOutput:
    """The same for teacher-forced training blocks, A anchors a row."""

    logits: mx.array
    """``(B, A, G, Vd)``."""
    hidden: mx.array
    """``(B, A, G, H)``."""
    confidence_logits: mx.array | None
    """``(B, A, G)`` float32, or None."""


class TiedHead(nn.Module):
    """An lm_head that is an embedding read backwards (plain or quantised)."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def __call__(self, hidden: mx.array) -> mx.array:
        return self.embedding.as_linear(hidden)


def _weight_type(head: nn.Module) -> mx.Dtype:
    """The floating type a (quantised) linear map computes in."""
    source = head.embedding if isinstance(head, TiedHead) else head
    return source.scales.dtype if "scales" in source else source.weight.dtype


class Drafter(nn.Module):
    """A drafter with random weights; ``load_drafter`` fills one from a checkpoint.

    Shapes: B rows, G slots, L positions, A anchors, T taps, H hidden, V target
    vocabulary, Vd draft vocabulary.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.block_size = config.block_size
        self.calibration: DraftCalibration | None = None
        """Temperature of each slot's confidence logit, for the engine to divide by."""
        self.borrowed: frozenset[str] = frozenset()
        """Which of ``embed_tokens`` and ``lm_head`` are the target's (see ``pairing``)."""
        hidden = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.fc = nn.Linear(config.feature_size, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        windows = config.windows or (None,) * config.num_hidden_layers
        self.layers = [self._make_layer(config, window) for window in windows]
        self.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.lm_head: nn.Module = nn.Linear(hidden, config.logit_size, bias=False)
        self.markov_head = make_head(config)
        self.confidence_head = None
        if config.enable_confidence_head:
            extra = config.markov_rank if config.confidence_head_with_markov else 0
            self.confidence_head = ConfidenceHead(hidden + extra)
        # Slots at the block's front that predict nothing (speculators' bonus anchor).
        self.silent_slots = 0 if config.sample_from_anchor else 1
        self.embed_scale = hidden**0.5 if config.architecture == "gemma4" else 1.0
        self._draft_to_target: mx.array | None = None
        self._logit_limit: int | None = None
        self.freeze_shared()

    def _make_layer(self, config: DrafterConfig, window: int | None) -> DraftLayer:
        return DraftLayer(config, window)

    def freeze_shared(self) -> None:
        """Embedding and lm_head are the target's own and never trained."""
        self.embed_tokens.freeze()
        self.lm_head.freeze()

    # -- vocabulary -------------------------------------------------------------------

    @property
    def dtype(self) -> mx.Dtype:
        """The type hidden states are computed in."""
        return self.norm.weight.dtype

    @property
    def draft_to_target(self) -> mx.array | None:
        """``(Vd,)`` int32 target id of every draft id; None when they are the same ids."""
        return self._draft_to_target

    def limit_logits(self, ids: int) -> None:
        """Draft only the first ``ids`` ids: what lies behind is padding of one vocabulary."""
        self._logit_limit = ids

    def set_draft_vocabulary(self, target_ids: mx.array) -> None:
        """Say which target id each of the ``draft_vocab_size`` columns stands for."""
        if target_ids.shape != (self.config.logit_size,):
            raise PairingError(
                f"a draft vocabulary of {self.config.logit_size} needs as many target ids, "
                f"got shape {tuple(target_ids.shape)}"
            )
        self._draft_to_target = target_ids.astype(mx.int32)

    def to_target_ids(self, draft_ids: mx.array) -> mx.array:
        """Draft ids ``(...)`` as target ids ``(...)``."""
        if self._draft_to_target is None:
            return draft_ids
        return self._draft_to_target[draft_ids]

    def check_width(self, width: int | None) -> int:
        """The number of slots to draft. Raises PairingError beyond the trained block."""
        width = self.block_size if width is None else width
        if not 1 <= width <= self.block_size:
            raise PairingError(
                f"draft length {width} is outside 1..{self.block_size}, "
                f"the block this drafter was trained for",
                f"use a draft length of at most {self.block_size}",
            )
        return width

    # -- context ----------------------------------------------------------------------

    def project(self, features: mx.array) -> mx.array:
        """Tapped target features ``(B, L, T*H_target)`` to ``(B, L, H)``."""
        return self.hidden_norm(self.fc(features.astype(self.dtype)))

    def make_context(self, rows: int = 1) -> list[RowsKV]:
        """An empty context: one cache a draft layer."""
        windows = self.config.windows or (None,) * len(self.layers)
        # Counted from the anchor, a window reaches one position further than from slot 0 itself.
        more = int(self.config.window_from_anchor)
        return [RowsKV(rows, window and window + more) for window in windows]

    def extend(
        self,
        features: mx.array,
        context: Sequence[RowsKV],
        start: Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
    ) -> None:
        """Append the keys and values of ``features (B, L, T*H_target)`` to every row.

        ``start`` says at which position each row's features begin; what a row
        holds from there on is forgotten first, and a gap is refused with
        CacheError. ``counts`` says how many of the L positions are real in each
        row: the rest is dropped again (default: all are).
        """
        if start is not None:
            for length, begin in zip(context[0].lengths, start, strict=True):
                if begin > length:
                    raise CacheError(
                        f"the draft context ends at position {length}, "
                        f"but the new features begin at {begin}"
                    )
            for cache in context:
                cache.trim_to(list(start))
        before, offset = list(context[0].lengths), context[0].offset
        projected = self.project(features)
        for layer, cache in zip(self.layers, context, strict=True):
            cache.update_and_fetch(*layer.self_attn.keys_values(projected, offset))
            if counts is not None:
                cache.trim_to([n + c for n, c in zip(before, counts, strict=True)])

    # -- drafting ---------------------------------------------------------------------

    def backbone(
        self, anchors: mx.array, context: Sequence[RowsKV], width: int | None = None
    ) -> mx.array:
        """Hidden states ``(B, G, H)`` of a block after the final norm.

        ``anchors (B,)`` stand right behind their rows' contexts. A ``width``
        below ``block_size`` is cheaper but not the first slots of the full block:
        slots see each other in both directions.
        """
        slots = self.check_width(width) + self.silent_slots
        x = self._block_input(anchors[:, None], slots)[:, 0]
        for layer, cache in zip(self.layers, context, strict=True):
            x = layer(x, cache)
        return self.norm(x[:, self.silent_slots :])

    def base_logits(self, hidden: mx.array) -> mx.array:
        """``(..., H)`` to logits ``(..., Vd)`` before the sequential head."""
        # The target's head keeps its own type: casting a matrix of that size costs more
        # than the product.
        logits = self.lm_head(hidden.astype(_weight_type(self.lm_head)))
        if self._logit_limit is not None:
            logits = logits[..., : self._logit_limit]
        cap = self.config.final_logit_softcapping
        return logits if cap is None else mx.tanh(logits / cap) * cap

    def draft(
        self,
        anchors: mx.array,
        context: Sequence[RowsKV],
        width: int | None = None,
        sampler: Sampler | None = None,
        *,
        narrow: bool = False,
    ) -> DraftOutput:
        """Draft behind ``anchors (B,)``, left to right; greedy without a sampler.

        ``width`` limits the sequential walk: the result is the first ``width``
        slots of the full block. With ``narrow`` the block itself is that short,
        which is cheaper still, but a block of another length than the trained one.
        """
        width = self.check_width(width)
        hidden = self.backbone(anchors, context, width if narrow else None)[:, :width]
        anchors = anchors.astype(mx.int32)
        base = self.base_logits(hidden)
        head = self.markov_head
        previous = anchors
        state = None if head is None else head.start(anchors.shape)
        logits, draft_ids, tokens = [], [], [anchors]
        for k in range(hidden.shape[1]):
            slot, state = self.slot_logits(base[:, k], previous, hidden[:, k], state)
            ids = mx.argmax(slot, axis=-1) if sampler is None else sampler(slot, k)
            ids = ids.astype(mx.int32)
            previous = self.to_target_ids(ids)
            logits.append(slot)
            draft_ids.append(ids)
            tokens.append(previous)
        return DraftOutput(
            tokens=mx.stack(tokens[1:], axis=1),
            draft_ids=mx.stack(draft_ids, axis=1),
            logits=mx.stack(logits, axis=1),
            hidden=hidden,
            confidence_logits=self.confidence(hidden, mx.stack(tokens[:-1], axis=1)),
        )

    def slot_logits(
        self, base: mx.array, previous: mx.array, hidden: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """One slot's logits ``(B, Vd)`` behind tokens ``previous (B,)``, and the next state."""
        if self.markov_head is None:
            return base, state
        bias, state = self.markov_head.bias(previous, hidden, state)
        return base + bias, state

    def confidence(self, hidden: mx.array, previous: mx.array) -> mx.array | None:
        """Confidence logits of slots ``hidden (..., G, H)`` behind tokens ``previous (..., G)``."""
        if self.confidence_head is None:
            return None
        embedded = None
        if self.markov_head is not None and self.config.confidence_head_with_markov:
            embedded = self.markov_head.embed(previous)
        return self.confidence_head(hidden, embedded)

    # -- training ---------------------------------------------------------------------

    def forward_blocks(
        self, features: mx.array, anchors: mx.array, previous: mx.array
    ) -> BlockOutput:
        """Teacher-forced blocks: ``features (B, L, T*H_target)``, ``anchors (B, A)`` positions.

        ``previous (B, A, G)`` are the true tokens before each predicted one,
        ``previous[..., 0]`` the anchors' own. A block sees context positions
        before its anchor and its own slots, nothing else.
        """
        hidden = self.block_hidden(features, anchors, previous[..., 0])
        return BlockOutput(
            self.block_logits(hidden, previous), hidden, self.confidence(hidden, previous)
        )

    def block_hidden(
        self, features: mx.array, anchors: mx.array, anchor_tokens: mx.array
    ) -> mx.array:
        """Hidden states ``(B, A, G, H)`` of the blocks behind ``anchor_tokens (B, A)``."""
        rows, blocks = anchors.shape
        slots = self.block_size + self.silent_slots
        projected = self.project(features)
        x = self._block_input(anchor_tokens, slots).reshape(rows * blocks, slots, -1)
        visible = mx.arange(features.shape[1]) < anchors[..., None]
        positions = anchors.reshape(-1).astype(mx.int32)
        for layer in self.layers:
            x = layer.over_blocks(x, projected, positions, visible)
        x = self.norm(x[:, self.silent_slots :])
        return x.reshape(rows, blocks, self.block_size, -1)

    def block_logits(self, hidden: mx.array, previous: mx.array) -> mx.array:
        """Logits ``(..., G, Vd)`` of ``hidden (..., G, H)`` behind true tokens ``(..., G)``."""
        logits = self.base_logits(hidden)
        if self.markov_head is None:
            return logits
        return logits + self.markov_head.block_bias(previous, hidden)

    # -- inside -----------------------------------------------------------------------

    def _block_input(self, anchor_tokens: mx.array, slots: int) -> mx.array:
        """Embeddings ``(B, A, slots, H)`` of ``[anchor] + [mask] * (slots - 1)``."""
        last = self.embed_tokens.weight.shape[0] - 1
        anchor = mx.minimum(anchor_tokens, last)[..., None]
        masks = mx.full((*anchor_tokens.shape, slots - 1), self.config.mask_token_id, anchor.dtype)
        x = self.embed_tokens(mx.concatenate([anchor, masks], axis=-1))
        return (x * self.embed_scale).astype(self.dtype)
