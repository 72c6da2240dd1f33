"""The drafter before its first step: its shape, its draft vocabulary and its first weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..draft.dspark.config import DrafterConfig
from ..draft.dspark.load_drafter import load_drafter
from ..draft.dspark.network import Drafter
from ..draft.dspark.pairing import attach_target
from ..errors import UsageError
from ..model.target import Target
from .data import TrainingSample
from .initial_weights import INITIAL_NORM_SCALE, bigram_factors, init_previous_token_attention
from .train_options import TrainOptions

FIRST_POSITIONS = 4  # of a text: in most models their hidden states are unlike all others


def fresh_drafter(
    options: TrainOptions,
    target: Target,
    tokenizer: Any,
    samples: Sequence[TrainingSample],
    say: Callable[[str], None],
) -> tuple[Drafter, np.ndarray | None]:
    """A new drafter for ``target`` and its draft vocabulary ``(Vd,)``; None for all ids."""
    counts = count_ids(samples, target.vocab_size)
    vocab_ids = None
    if options.draft_vocab is not None and options.draft_vocab < target.vocab_size:
        always = sorted(getattr(tokenizer, "eos_token_ids", None) or [])
        vocab_ids, covered = draft_vocabulary(counts, options.draft_vocab, always)
        say(f"draft vocabulary: {len(vocab_ids):,} ids cover {covered:.2%} of the answers' tokens")
    config = new_config(
        target,
        options,
        mask_token_id=choose_mask_token(tokenizer, counts, target.vocab_size),
        draft_vocab_size=None if vocab_ids is None else len(vocab_ids),
    )
    text, factors = None, None
    if options.init != "random":
        text = text_sample(samples)
        if options.head != "rnn" and options.rank:  # a table alone does not make an rnn's bias
            factors = bigram_factors(samples, target.vocab_size, vocab_ids, options.rank)
    drafter = build_drafter(
        config, target, vocab_ids, seed=options.seed, text=text, bigrams=factors
    )
    return drafter, vocab_ids


def trained_drafter(
    options: TrainOptions, target: Target, say: Callable[[str], None]
) -> tuple[Drafter, np.ndarray | None]:
    """The drafter in ``options.start_from``, in float32, and its draft vocabulary."""
    folder = Path(options.start_from or "")
    drafter = load_drafter(folder, target, dtype=mx.float32, share_with_target=True)
    if drafter.config.quantization is not None:
        raise UsageError(
            f"the drafter in {folder} is quantised", "start from one that is not quantised"
        )
    if options.shaped_like(drafter.config) != options:
        raise UsageError(f"the drafter in {folder} has another shape than was asked for")
    drafter.train()
    drafter.freeze_shared()
    say(f"starting from the drafter in {folder}")
    ids = drafter.draft_to_target
    return drafter, None if ids is None else np.array(ids)


def build_drafter(
    config: DrafterConfig,
    target: Target,
    vocab_ids: np.ndarray | None,
    *,
    seed: int,
    text: mx.array | None = None,
    bigrams: tuple[np.ndarray, np.ndarray] | None = None,
) -> Drafter:
    """A drafter that shares the target's embedding and head, ready to train.

    ``text (B, L)`` is a sample of the target's answers; with it attention begins as in
    ``init_previous_token_attention``, without it at random. ``bigrams`` are the first weights of
    the sequential head (see ``bigram_factors``).
    """
    mx.random.seed(seed)
    drafter: Any = Drafter(config)
    if vocab_ids is not None:
        drafter.set_draft_vocabulary(mx.array(vocab_ids))
    attach_target(drafter, target)
    if (head := drafter.markov_head) is not None:
        # Better no bias at first than the bias of a random table.
        head.markov_w2.weight = mx.zeros_like(head.markov_w2.weight)
        if bigrams is not None:
            head.markov_w1.weight, head.markov_w2.weight = map(mx.array, bigrams)
    if drafter.confidence_head is not None:
        projection = drafter.confidence_head.proj
        projection.weight = mx.zeros_like(projection.weight)
        projection.bias = mx.zeros_like(projection.bias)
    if text is not None:
        _, taps, _ = target.forward_training(text, list(config.target_layer_ids))
        features = taps[:, FIRST_POSITIONS:].reshape(-1, taps.shape[-1]).astype(mx.float32)
        init_previous_token_attention(drafter, np.array(features), seed)
        if isinstance(target.norm, nn.RMSNorm):
            drafter.norm.weight = target.norm.weight.astype(mx.float32)
        if bigrams is not None:
            drafter.norm.weight = drafter.norm.weight * INITIAL_NORM_SCALE
    mx.eval(drafter.parameters())
    built: Drafter = drafter
    return built


# -- shape -------------------------------------------------------------------------------------


def spread_taps(layers: int, count: int) -> tuple[int, ...]:
    """``count`` layers, evenly from the second to the third last, as DeepSpec chooses them."""
    if count < 1 or count > layers:
        raise UsageError(f"{count} taps do not fit a target of {layers} layers")
    first, last = min(1, layers - 1), max(layers - 3, 0)
    if count == 1:
        return (last,)
    taps = sorted({round(first + i * (last - first) / (count - 1)) for i in range(count)})
    if len(taps) < count:
        taps = list(range(layers - count, layers))
    return tuple(taps)


def new_config(
    target: Target,
    options: TrainOptions,
    *,
    mask_token_id: int,
    draft_vocab_size: int | None = None,
) -> DrafterConfig:
    """A drafter of Qwen3's architecture with the widths of the target."""
    text = target.config.get("text_config", target.config)
    heads = text["num_attention_heads"]
    rope = dict(text.get("rope_scaling") or text.get("rope_parameters") or {})
    rope["rope_theta"] = float(text.get("rope_theta") or rope.get("rope_theta") or 10000.0)
    rope.setdefault("rope_type", rope.pop("type", "default"))
    return DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=text["intermediate_size"],
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or target.hidden_size // heads,
        vocab_size=target.vocab_size,
        block_size=options.block,
        mask_token_id=mask_token_id,
        target_layer_ids=options.taps or spread_taps(target.num_layers, options.tap_count),
        draft_vocab_size=draft_vocab_size,
        markov_head_type=options.head if options.rank else None,
        markov_rank=options.rank,
        enable_confidence_head=True,
        confidence_head_with_markov=options.rank > 0,
        rms_norm_eps=float(text.get("rms_norm_eps") or 1e-6),
        rope_parameters=rope,
        max_position_embeddings=int(text.get("max_position_embeddings") or 32768),
        # The biases hold the pattern of ``init_previous_token_attention``.
        attention_bias=options.init == "recency",
        num_target_layers=target.num_layers,
        target_model_type=text.get("model_type"),
    )


def choose_mask_token(tokenizer: Any, counts: np.ndarray, vocab_size: int) -> int:
    """The tokenizer's mask token, or else a special id that no answer uses, or the last id."""
    own = getattr(tokenizer, "mask_token_id", None)
    if own is not None:
        return int(own)
    special = sorted(getattr(tokenizer, "all_special_ids", None) or [])
    unused = [i for i in special if i < vocab_size and counts[i] == 0]
    return unused[-1] if unused else vocab_size - 1


# -- vocabulary and text -----------------------------------------------------------------------


def count_ids(samples: Sequence[TrainingSample], vocab_size: int) -> np.ndarray:
    """How often each id is an answer token: ``(V,)``."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sample in samples:
        counts += np.bincount(sample.tokens[sample.start :], minlength=vocab_size)
    return counts


def draft_vocabulary(
    counts: np.ndarray, size: int, always: Iterable[int] = ()
) -> tuple[np.ndarray, float]:
    """The ``size`` most frequent ids in rising order, ``always`` among them; and their coverage.

    A drafter that cannot draft a rare id loses one accepted token there and stays lossless, while
    its logits cost a fraction. Coverage is the ids' share of all counted tokens. Of equally
    frequent ids the lower is taken.
    """
    if not 0 < size <= len(counts):
        raise UsageError(f"a draft vocabulary of {size} is outside 1..{len(counts)}")
    ranked = counts.astype(np.float64)
    ranked[list(always)] = np.inf
    ids = np.sort(np.argsort(-ranked, kind="stable")[:size]).astype(np.int32)
    return ids, float(counts[ids].sum() / max(1, counts.sum()))


def text_sample(samples: Sequence[TrainingSample]) -> mx.array:
    """Twelve of the longer samples, cut to one length: ``(B, L)``."""
    longest = sorted(samples[:512], key=len)[-12:]
    length = min(map(len, longest))
    return mx.array(np.stack([s.tokens[:length] for s in longest]))
