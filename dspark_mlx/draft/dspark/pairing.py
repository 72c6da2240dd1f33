"""Does this drafter fit this target, and what does it borrow from it?

A drafter reads the target's hidden states and proposes the target's ids, so
taps, widths and vocabulary must agree; a drafter for another model would load
and then propose nonsense. Embeddings and lm_head a checkpoint leaves out are
the target's own modules, quantised or not. No files are read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from ...errors import ModelError, PairingError
from .config import DrafterConfig
from .network import Drafter, TiedHead

# Two sizes of one tokenizer differ by rows added to round the matrix up; more is another tokenizer.
_PADDING_ROWS = 1024
_PADDING_SHARE = 0.01
HINT = "choose the drafter that was trained for this target"


class TargetLike(Protocol):
    """What a drafter needs to know of its target."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    embed_tokens: Any
    lm_head: Any
    """None when it is the embedding, read backwards."""


def check_pairing(config: DrafterConfig, target: TargetLike) -> None:
    """Raise PairingError, naming what differs, unless the drafter was made for such a target."""
    check_reading(
        target,
        taps=config.target_layer_ids,
        width=config.target_hidden_size or config.hidden_size,
        vocab_size=config.vocab_size,
        made_for=config.num_target_layers,
    )
    outside = [i for i in config.target_layer_ids if i >= target.num_layers]
    if outside:
        raise _tap_outside(outside[0], target)
    theirs = target.vocab_size
    if config.mask_token_id >= theirs:
        raise PairingError(
            f"the drafter's mask token {config.mask_token_id} "
            f"is outside the target's vocabulary of {theirs}",
            HINT,
        )


def check_reading(
    target: TargetLike,
    *,
    taps: Sequence[int],
    width: int,
    vocab_size: int,
    made_for: int | None = None,
) -> None:
    """Raise PairingError unless ``target`` has these taps, this hidden width and vocabulary.

    ``made_for`` is the number of target layers, where the drafter says it.
    """
    if made_for is not None and made_for != target.num_layers:
        raise PairingError(
            f"the drafter was trained on a target of {made_for} layers, "
            f"this one has {target.num_layers}",
            HINT,
        )
    outside = [i for i in taps if not -1 <= i <= target.num_layers]
    if outside:
        raise _tap_outside(outside[0], target)
    if not target.hidden_size:
        raise PairingError(
            "no token embedding and final norm were found in this target, so nothing can read it",
            "use --method lookup",
        )
    if width != target.hidden_size:
        raise PairingError(
            f"the drafter reads hidden states of width {width}, "
            f"the target's have {target.hidden_size}",
            HINT,
        )
    ours, theirs = vocab_size, target.vocab_size
    if abs(ours - theirs) > min(_PADDING_ROWS, _PADDING_SHARE * max(ours, theirs)):
        raise PairingError(
            f"the drafter's vocabulary has {ours} ids, the target's {theirs}: another tokenizer",
            HINT,
        )


def _tap_outside(tap: int, target: TargetLike) -> PairingError:
    return PairingError(
        f"the drafter taps layer {tap}, but the target has layers 0..{target.num_layers - 1}",
        HINT,
    )


def attach_target(drafter: Drafter, target: TargetLike, own: frozenset[str] = frozenset()) -> None:
    """Give the drafter its target: borrow what is not its ``own``, cut logits to real ids.

    ``own`` holds ``"embed_tokens"`` and ``"lm_head"`` where the drafter keeps
    its weights for them. Borrowed modules are frozen and stay the target's.
    Raises PairingError.
    """
    check_pairing(drafter.config, target)
    config = drafter.config
    borrowed = {"embed_tokens", "lm_head"} - own
    if borrowed and target.hidden_size != config.hidden_size:
        raise PairingError(
            f"the checkpoint has no {' and no '.join(sorted(borrowed))}, and the target's "
            f"are {target.hidden_size} wide where the drafter is {config.hidden_size}",
            "use a checkpoint that contains them",
        )
    if "embed_tokens" in borrowed:
        drafter.embed_tokens = target.embed_tokens
    if "lm_head" in borrowed:
        head = target.lm_head
        drafter.lm_head = TiedHead(target.embed_tokens) if head is None else head
    _fit_vocabulary(drafter, target, "lm_head" in borrowed)
    drafter.borrowed = frozenset(borrowed)
    drafter.freeze_shared()


def _fit_vocabulary(drafter: Drafter, target: TargetLike, head_is_borrowed: bool) -> None:
    """Never propose an id the target does not have, nor one without a row of our own."""
    ids = drafter.draft_to_target
    if ids is not None:
        highest = int(mx.max(ids))
        if highest >= target.vocab_size:
            raise PairingError(
                f"the draft vocabulary contains id {highest}, "
                f"outside the target's {target.vocab_size}",
                "choose the drafter that was trained for this target",
            )
        if head_is_borrowed:
            drafter.lm_head = take_rows(drafter.lm_head, ids)
        return
    if drafter.config.draft_vocab_size not in (None, drafter.config.vocab_size):
        raise PairingError(
            f"a draft vocabulary of {drafter.config.draft_vocab_size} ids without its d2t table"
        )
    limit = min(drafter.config.vocab_size, target.vocab_size)
    if (target.vocab_size if head_is_borrowed else drafter.config.vocab_size) > limit:
        drafter.limit_logits(limit)
    if drafter.markov_head is not None and drafter.config.vocab_size > limit:
        drafter.markov_head.markov_w2 = take_rows(drafter.markov_head.markov_w2, mx.arange(limit))


def take_rows(head: nn.Module, ids: mx.array) -> nn.Module:
    """A head over some ids only: ``ids (n,)`` of its output rows, quantised as it is.

    Quantisation groups run along the input, so rows can be picked out exactly.
    """
    source = head.embedding if isinstance(head, TiedHead) else head
    if isinstance(source, nn.QuantizedLinear | nn.QuantizedEmbedding):
        width = source.scales.shape[1] * source.group_size
        picked: nn.Module = nn.QuantizedLinear(
            width,
            ids.shape[0],
            bias=False,
            group_size=source.group_size,
            bits=source.bits,
            mode=source.mode,
        )
        names = ["weight", "scales", "biases", "bias"]
    elif isinstance(source, nn.Linear | nn.Embedding):
        picked = nn.Linear(source.weight.shape[1], ids.shape[0], bias=False)
        names = ["weight", "bias"]
    else:
        raise ModelError(
            f"cannot pick rows of an lm_head of type {type(source).__name__}",
            "use a drafter with its own lm_head",
        )
    for name in names:
        values = source.get(name)
        if values is not None:
            setattr(picked, name, values[ids])
    return picked
