"""Hidden states of the frozen target for each sample, computed on the fly, optionally cached.

For every position: the tapped hidden states, which the drafter reads; the last
hidden state after the final norm and the log of the softmax's denominator over
the *whole* vocabulary, from which the teacher's distribution over any draft
vocabulary follows. A bounded cache on disk may keep them (float16) for the
passes after the first; without one every pass runs the target again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..draft.dspark.pairing import take_rows
from ..errors import ModelError
from ..files import write_atomically
from ..model.target import Target
from .blocks import pad
from .data import TrainingSample

_F16_MAX = 65504.0
_CHUNK = 512  # positions whose full-vocabulary logits exist at one time


@dataclass(frozen=True)
class Features:
    """B padded rows of L positions; values behind the end of a row are not defined.

    ``taps (B, L, T*H)``; ``final (B, L, H)`` after the final norm; ``log_norm (B, L)`` float32 is
    the logsumexp of the target's logits at temperature 1, on answer tokens.
    """

    taps: mx.array
    final: mx.array
    log_norm: mx.array


class Teacher:
    """The target's output head over all ids, and over the draft vocabulary."""

    def __init__(self, target: Target, vocab_ids: np.ndarray | None) -> None:
        from ..draft.dspark.network import TiedHead

        whole: Any = target.lm_head
        if whole is None:
            whole = TiedHead(target.embed_tokens)
        self.whole: Any = whole
        self.draft: Any = whole if vocab_ids is None else take_rows(whole, mx.array(vocab_ids))
        text = target.config.get("text_config", target.config)
        self.softcap: float | None = text.get("final_logit_softcapping")

    def logits(self, final: mx.array, *, draft: bool = False) -> mx.array:
        """``final (..., H)`` to float32 logits over all ids, or over the draft vocabulary."""
        out: mx.array = (self.draft if draft else self.whole)(final).astype(mx.float32)
        return out if self.softcap is None else mx.tanh(out / self.softcap) * self.softcap

    def check(self, target: Target, taps: Sequence[int]) -> None:
        """Raise ModelError when this is not how the model makes its logits."""
        tokens = (mx.arange(16)[None] * 11 + 5) % target.vocab_size
        logits, _, final = target.forward_training(tokens, taps)
        gap: Any = mx.abs(self.logits(final) - logits.astype(mx.float32)).max().item()
        largest: Any = mx.abs(logits).max().item()
        if not gap <= 1e-2 * max(1.0, largest):
            raise ModelError(
                "this model changes its logits after the output head (a scale or bias of its own)",
                "training a drafter for it is not supported",
            )


class FeatureSource:
    """Features of batches of samples, computed once where ``cache`` has room for them."""

    def __init__(
        self,
        target: Target,
        taps: Sequence[int],
        teacher: Teacher,
        cache: FeatureCache | None = None,
    ) -> None:
        self.target, self.taps, self.teacher, self.cache = target, list(taps), teacher, cache

    def batch(self, samples: Sequence[TrainingSample]) -> Features:
        if self.cache is None:
            return self._compute(*pad(samples))
        missing = [s for s in samples if s not in self.cache]
        if missing:
            features = self._compute(*pad(missing))
            self.cache.write(missing, features)
            if len(missing) == len(samples):
                return features
            if any(s not in self.cache for s in missing):  # the cache is full
                return self._compute(*pad(samples))
        return self.cache.read(samples)

    def _compute(self, tokens: np.ndarray, answer: np.ndarray) -> Features:
        _, taps, final = self.target.forward_training(mx.array(tokens), self.taps)
        mx.eval(taps, final)
        # Nothing is drafted inside a prompt: no logits are needed there.
        places = np.flatnonzero(answer)
        flat = final.reshape(-1, final.shape[-1])
        norms = np.zeros(answer.size, dtype=np.float32)
        for begin in range(0, len(places), _CHUNK):
            chosen = places[begin : begin + _CHUNK]
            logits = self.teacher.logits(flat[mx.array(chosen)])
            norms[chosen] = np.array(mx.logsumexp(logits, axis=-1))
        return Features(taps, final, mx.array(norms.reshape(answer.shape)))


class FeatureCache:
    """A file of at most ``limit`` bytes with the features of the samples that came first.

    Features are float16, one contiguous run per sample; ``save`` writes the index. A cache of
    other taps or another target (``target`` is its fingerprint) is started anew. Each process of
    a run writes a folder of its own, ``number``, and reads those of the other processes.
    """

    def __init__(
        self,
        root: Path,
        taps: Sequence[int],
        hidden: int,
        limit: int,
        number: int = 0,
        target: str = "",
    ) -> None:
        folder = root / str(number)
        self.width = (len(taps) + 1) * hidden
        self.hidden, self.limit = hidden, limit
        self.row_bytes = 2 * self.width + 4
        self.path, self.index_path = folder / "features.bin", folder / "features.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.kind = {"taps": list(taps), "hidden": hidden, "target": target}
        self.index, self.used = self._load(self.index_path)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        self._root, self._own = root, folder
        self._others: list[tuple[int, dict[str, int]]] = []
        self._find_others()

    def __contains__(self, sample: TrainingSample) -> bool:
        return self._place(_key(sample)) is not None

    def _place(self, key: str) -> tuple[int, int] | None:
        """The open file and offset of a sample."""
        for file, index in ((self._file, self.index), *self._others):
            if key in index:
                return file, index[key]
        return None

    def _find_others(self) -> None:
        for file, _ in self._others:
            os.close(file)
        self._others = []
        for folder in sorted(self._root.iterdir()):
            index, used = self._load(folder / "features.json")
            if folder != self._own and used:
                self._others.append((os.open(folder / "features.bin", os.O_RDONLY), index))

    def write(self, samples: Sequence[TrainingSample], features: Features) -> None:
        """Keep what fits below the limit; the rest is computed again in each pass."""
        joined = mx.concatenate([features.taps, features.final], axis=-1).astype(mx.float32)
        both = np.array(mx.clip(joined, -_F16_MAX, _F16_MAX).astype(mx.float16))
        norms = np.array(features.log_norm)
        for row, sample in enumerate(samples):
            size = len(sample) * self.row_bytes
            if sample in self or self.used + size > self.limit:
                continue
            n = len(sample)
            run = both[row, :n].tobytes() + norms[row, :n].tobytes()
            if os.pwrite(self._file, run, self.used) < len(run):  # the disk is full
                self.limit = self.used
                return
            self.index[_key(sample)] = self.used
            self.used += size

    def read(self, samples: Sequence[TrainingSample]) -> Features:
        longest = max(len(s) for s in samples)
        both = np.zeros((len(samples), longest, self.width), dtype=np.float16)
        norms = np.zeros((len(samples), longest), dtype=np.float32)
        for row, sample in enumerate(samples):
            n = len(sample)
            place = self._place(_key(sample))
            assert place is not None
            raw = os.pread(place[0], n * self.row_bytes, place[1])
            cut = n * 2 * self.width
            both[row, :n] = np.frombuffer(raw[:cut], np.float16).reshape(n, self.width)
            norms[row, :n] = np.frombuffer(raw[cut:], np.float32)
        values = mx.array(both).astype(mx.float32)
        split = self.width - self.hidden
        return Features(values[..., :split], values[..., split:], mx.array(norms))

    def save(self) -> None:
        """Write the index, after the data that it points to."""
        os.fsync(self._file)
        index = {**self.kind, "used": self.used, "index": self.index}
        write_atomically(self.index_path, json.dumps(index))
        self._find_others()

    def _load(self, path: Path) -> tuple[dict[str, int], int]:
        try:
            kept = json.loads(path.read_text())
        except (OSError, ValueError):
            return {}, 0
        if {k: kept.get(k) for k in self.kind} != self.kind:
            return {}, 0
        return kept["index"], kept["used"]


def _key(sample: TrainingSample) -> str:
    return hashlib.sha256(sample.tokens.tobytes()).hexdigest()[:24]
