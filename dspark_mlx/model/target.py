"""The target: an mlx-lm model whose hidden states can be read on the way.

Runs the model through its own ``__call__``, never a copy of it, so that
embedding scales, soft caps and masks are the model's own. Chosen decoder layers
are *tapped* for the time of one call (``taps``).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from ..errors import DsparkError, ModelError
from .cache import Rollback
from .rows import Rows, RowsFactory
from .taps import EMBEDDING, EagerDispatch, record, watched

_MAKING = threading.Lock()


class Target:
    """A loaded target model.

    ``model`` is mlx-lm's module. ``config`` is its config.json as a dict.
    ``kv_bits`` quantises the KV cache, ``kv_group_size`` values at a time (None:
    as many as fit the heads).
    """

    def __init__(
        self,
        model: nn.Module,
        config: dict[str, Any] | None = None,
        *,
        kv_bits: int | None = None,
        kv_group_size: int | None = None,
    ) -> None:
        self.model = model
        # Held for a whole round: threads with engines of their own on one model take turns.
        self.model_lock = _model_lock(model)
        self.config = config or {}
        self.factory = RowsFactory(model, kv_bits, kv_group_size)
        self.kv_bits = kv_bits
        self.kv_group_size = kv_group_size
        self.layers: list[nn.Module] = list(model.layers)
        # What drafters share and read; models that name these parts otherwise have none of it
        # and decode without a drafter.
        inner = _inner(model)
        self.embed_tokens: Any = inner.embed_tokens if inner is not None else None
        self.norm: Any = inner.norm if inner is not None else None
        self.lm_head: nn.Module | None = _find_lm_head(model)
        if inner is None:
            self.vocab_size, self.hidden_size = model(mx.array([[0]])).shape[-1], 0
        else:
            self.vocab_size, self.hidden_size = _embedding_shape(self.embed_tokens)
        self.num_layers = len(self.layers)
        # Bytes one position of one row takes in the KV cache; known once ``check`` has run.
        self.kv_bytes_per_token = 0.0
        # Whether rows of different lengths may share a call; ``check`` finds out.
        self.batches = self.rollback != "none"

    @property
    def weight_bytes(self) -> int:
        return sum(v.nbytes for v in named_tensors(self.model).values())

    @property
    def dtype(self) -> mx.Dtype:
        """The floating type the model computes in."""
        if self.norm is not None:
            return self.norm.weight.dtype
        dtypes = (v.dtype for v in named_tensors(self.model).values())
        return next(d for d in dtypes if mx.issubdtype(d, mx.floating))

    @property
    def rollback(self) -> Rollback:
        """How rejected tokens leave the caches; with ``none`` nothing can be drafted."""
        return self.factory.rollback

    @property
    def no_rollback_reason(self) -> str:
        """Why nothing can be drafted for this model, for a message; empty where it can."""
        kinds = ", ".join(self.factory.cannot_roll_back)
        return f"the model's cache ({kinds}) cannot be rolled back" if kinds else ""

    @property
    def context_limit(self) -> int:
        """Most positions the model was made for; 0 when its config does not say."""
        text = self.config.get("text_config", self.config)
        return int(text.get("max_position_embeddings") or 0)

    def make_rows(self) -> Rows:
        """An empty one-row KV state of this model's kind."""
        return self.factory.make()

    def forward(
        self,
        tokens: mx.array,
        rows: Rows,
        taps: Sequence[int] = (),
        eager: EagerDispatch | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        """One call of the model on ``tokens (B, L)``, appended to ``rows``.

        Returns logits ``(B, L, V)`` and, with ``taps``, features
        ``(B, L, len(taps) * H)``: the raw outputs of those decoder layers
        (-1: what enters the first; ``num_layers``: what the final norm gives),
        concatenated in that order. Both lazy:
        logits that nobody evaluates are never computed. ``eager`` is given hidden
        states on the way, for the device to begin on (``mx.async_eval``). The
        caller rolls ``rows`` back to what it keeps before the next call.
        """
        if not taps and eager is None:
            return self.model(tokens, cache=rows.layers), None
        finals: list[mx.array] = []
        inner = [tap for tap in taps if tap < self.num_layers]
        with ExitStack() as stack:
            seen = stack.enter_context(record(self.layers, inner, eager))
            if self.num_layers in taps:
                stack.enter_context(watched(self.norm, finals.append))
            logits = self.model(tokens, cache=rows.layers)
        if finals:
            seen[self.num_layers] = finals[-1]
        if not taps:
            return logits, None
        return logits, mx.concatenate([seen[i] for i in taps], axis=-1)

    def forward_training(
        self, tokens: mx.array, taps: Sequence[int]
    ) -> tuple[mx.array, mx.array, mx.array]:
        """One call without a cache on ``tokens (B, L)``, for training.

        Returns logits (lazy), features as in ``forward``, and the last hidden
        states ``(B, L, H)`` after the final norm, which the teacher's
        distribution is made from.
        """
        finals: list[mx.array] = []
        with record(self.layers, taps) as seen, watched(self.norm, finals.append):
            logits = self.model(tokens)
        return logits, mx.concatenate([seen[i] for i in taps], axis=-1), finals[-1]

    def check(self, taps: Sequence[int] = ()) -> None:
        """Refuse a model that our caches or taps would change.

        Compares the logits of one plain call with those of two tapped calls on
        our own cache. Raises ModelError when they differ by more than rounding.
        A model that is right for one row but not for ragged rows, such as one
        that broadcasts masks of its own shape, serves one request at a time.
        """
        bad = [i for i in taps if not EMBEDDING <= i <= self.num_layers]
        if bad:
            raise ModelError(
                f"tap {bad[0]} does not exist: this target has layers 0..{self.num_layers - 1}"
            )
        tokens = (mx.arange(12)[None] * 7 + 3) % self.vocab_size
        try:
            plain = self.model(tokens).astype(mx.float32)
            mx.eval(plain)
        except Exception as error:
            raise ModelError(
                f"this model cannot run: {str(error).splitlines()[0]}",
                "its config.json or its weights are not what its architecture needs",
            ) from error
        try:
            self.kv_bytes_per_token = self._measure_kv()
            rows = RowsFactory(self.model).make()
            first, features = self.forward(tokens[:, :9], rows, taps)
            rows.trim_to([9])
            ragged = self._ragged(rows, tokens)
            second, _ = self.forward(tokens[:, 9:], rows, taps, eager=mx.async_eval)
            mx.eval(first, second, *([] if features is None else [features]))
        except DsparkError:
            raise
        except Exception as error:
            kind = "KV cache" if self.kv_bits is None else f"KV cache of {self.kv_bits} bits"
            raise ModelError(
                f"this model cannot run on our {kind}: {str(error).splitlines()[0]}",
                "its architecture is not supported; use another model"
                if self.kv_bits is None
                else "leave --kv-bits out",
            ) from error
        tolerance = 1e-3 if self.dtype == mx.float32 else 0.1
        change = _difference(mx.concatenate([first, second], axis=1), plain)
        if not change <= tolerance:
            raise ModelError(
                f"this model's logits change by {change:.2g} (relative) when its hidden "
                "states are read or its cache is replaced",
                "its architecture is not supported; use another model",
            )
        together = mx.concatenate([plain[:, 9:12], plain[:, 6:9]])
        self.batches = ragged is not None and _difference(ragged, together) <= tolerance

    def _ragged(self, rows: Rows, tokens: mx.array) -> mx.array | None:
        """Logits of three tokens behind 9 and behind 6 in one call; None if it is not possible."""
        if self.rollback == "none":
            return None
        both, shorter = rows.extract(0), rows.extract(0)
        shorter.trim_to([6])
        both.extend(shorter)
        try:
            logits, _ = self.forward(mx.concatenate([tokens[:, 9:12], tokens[:, 6:9]]), both)
            mx.eval(logits)
        except ValueError:  # shapes that do not broadcast
            return None
        return logits

    def _measure_kv(self) -> float:
        """Bytes a position takes, from a row that holds a few; 0 for caches of another kind."""
        rows = self.make_rows()
        if self.rollback == "none":
            return 0.0
        self.forward(mx.array([[0, 1]]), rows)
        return sum(part.nbytes / part.shape[2] for part in rows.arrays)


def _model_lock(model: nn.Module) -> Any:
    """The one lock of ``model``, whoever asks."""
    with _MAKING:
        lock = getattr(model, "_model_lock", None)
        if lock is None:
            lock = threading.RLock()
            object.__setattr__(model, "_model_lock", lock)
        return lock


def named_tensors(model: nn.Module) -> dict[str, mx.array]:
    """A module's parameters by their dotted names."""
    flat: Any = tree_flatten(model.parameters())
    return dict(flat)


def to_float(model: nn.Module, dtype: mx.Dtype) -> nn.Module:
    """Dequantise ``model`` and compute in ``dtype``, in place.

    On the CPU backend float32 is several times faster than quantised or 16-bit
    arithmetic; on Metal models are left as they are.
    """
    # Scales first, so that the weights are dequantised in the type they will have.
    model.set_dtype(dtype)
    dequantize_model(model)
    return model


def _difference(ours: mx.array, plain: mx.array) -> float:
    """The largest difference of two arrays of logits, relative to the largest of them."""
    scale = mx.maximum(mx.max(mx.abs(plain)), 1e-6)
    return float(mx.max(mx.abs(ours.astype(mx.float32) - plain)) / scale)


def _inner(model: nn.Module) -> Any:
    """The submodule with ``embed_tokens`` and the final ``norm``; None where there is none."""
    queue = [model]
    while queue:
        module = queue.pop(0)
        if "embed_tokens" in module and "norm" in module:
            return module
        queue += [child for child in module.children().values() if isinstance(child, nn.Module)]
    return None


def _find_lm_head(model: nn.Module) -> nn.Module | None:
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] == "lm_head":
            return module
    return None


def _embedding_shape(embedding: Any) -> tuple[int, int]:
    vocab = embedding.weight.shape[0]
    if isinstance(embedding, nn.QuantizedEmbedding):
        return vocab, embedding.scales.shape[-1] * embedding.group_size
    return vocab, embedding.weight.shape[1]
