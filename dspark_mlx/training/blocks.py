"""Blocks: which anchors a batch trains on, and which token each slot should predict.

An anchor at position n holds the last committed token; slot k (from 0) predicts
token n + 1 + k having read tokens n .. n + k. Anchors lie in the answer, where
the engine's own lie. Everything here is numpy on small integer arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .data import TrainingSample

_WINDOW = 256  # samples sorted by length together


@dataclass(frozen=True)
class Blocks:
    """B rows of A anchors with G slots each.

    ``anchors (B, A)`` are positions, 0 for padding anchors. The others are ``(B, A, G)``:
    ``labels`` is the true token of each slot and ``previous`` the true token before it; ``valid``
    says whether the slot counts (a real anchor, and its token in the answer); ``places`` is the
    position whose final hidden state gives the target's distribution for the slot.
    """

    anchors: np.ndarray
    previous: np.ndarray
    labels: np.ndarray
    valid: np.ndarray
    places: np.ndarray


def make_blocks(
    tokens: np.ndarray, answer: np.ndarray, anchors: np.ndarray, real: np.ndarray, width: int
) -> Blocks:
    """Blocks of ``width`` slots at ``anchors (B, A)``, of which ``real (B, A)`` count.

    ``tokens (B, L)``; ``answer (B, L)`` is true on answer tokens. A slot counts if its own token
    and those of all slots before it are answer tokens.
    """
    length = tokens.shape[1]
    slots = anchors[..., None] + np.arange(width)
    places = np.minimum(slots, length - 1)
    nexts = np.minimum(slots + 1, length - 1)
    rows = np.arange(tokens.shape[0])[:, None, None]
    inside = (slots + 1 < length) & answer[rows, nexts]
    valid = np.logical_and.accumulate(inside & real[..., None], axis=-1)
    return Blocks(anchors, tokens[rows, places], tokens[rows, nexts], valid, places)


def choose_anchors(
    samples: Sequence[TrainingSample], spacing: float, most: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Random anchors: one per ``spacing`` answer positions, at most ``most`` in a row.

    Returns ``anchors (B, A)``, rising in each row, and ``real (B, A)``, false for padding.
    """
    picked = []
    for sample in samples:
        room = np.arange(sample.start, len(sample) - 1)
        count = min(most, max(1, round(len(room) / spacing)), len(room))
        picked.append(np.sort(rng.choice(room, count, replace=False)))
    widest = max(len(p) for p in picked)
    anchors = np.zeros((len(samples), widest), dtype=np.int32)
    real = np.zeros((len(samples), widest), dtype=bool)
    for row, chosen in enumerate(picked):
        anchors[row, : len(chosen)], real[row, : len(chosen)] = chosen, True
    return anchors, real


def pad(samples: Sequence[TrainingSample]) -> tuple[np.ndarray, np.ndarray]:
    """``tokens (B, L)``, padded on the right, and ``answer (B, L)``, true on answer tokens."""
    longest = max(len(s) for s in samples)
    tokens = np.zeros((len(samples), longest), dtype=np.int32)
    answer = np.zeros((len(samples), longest), dtype=bool)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample)] = sample.tokens
        answer[row, sample.start : len(sample)] = True
    return tokens, answer


def plan_batches(
    samples: Sequence[TrainingSample], batch_tokens: int, rng: np.random.Generator
) -> list[list[int]]:
    """Random batches of samples of similar length: their indices.

    A batch has at most ``batch_tokens`` tokens, padding included. Samples are shuffled, sorted by
    length within windows only, and the batches are shuffled again: a pass stays random while
    padding stays small.
    """
    order = rng.permutation(len(samples))
    batches: list[list[int]] = []
    for begin in range(0, len(order), _WINDOW):
        window = order[begin : begin + _WINDOW].tolist()
        by_length = sorted(window, key=lambda i: len(samples[i]))
        batch: list[int] = []
        for index in by_length:
            if batch and len(samples[index]) * (len(batch) + 1) > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(index)
        batches.append(batch)
    return [batches[i] for i in rng.permutation(len(batches))]
