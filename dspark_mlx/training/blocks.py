"""Blocks: which anchors a batch trains on, and what each slot should predict.

An anchor at position n holds the last committed token; slot k (from 0) predicts
token n + 1 + k having read tokens n .. n + k. Anchors lie in the answer, where
the engine's own lie. Everything here is numpy on small integer arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .data import Sample


@dataclass(frozen=True)
class Blocks:
    """B rows of A anchors with G slots each."""

    anchors: np.ndarray
    """``(B, A)`` positions; padding anchors are 0."""
    previous: np.ndarray
    """``(B, A, G)`` the true token before each predicted one."""
    labels: np.ndarray
    """``(B, A, G)`` the true token."""
    valid: np.ndarray
    """``(B, A, G)`` whether the slot counts: a real anchor, its token inside the answer."""
    places: np.ndarray
    """``(B, A, G)`` the position whose final hidden state is the teacher of the slot."""


def make_blocks(
    tokens: np.ndarray, answer: np.ndarray, anchors: np.ndarray, real: np.ndarray, width: int
) -> Blocks:
    """Blocks of ``width`` slots at ``anchors (B, A)``, of which ``real (B, A)`` count.

    ``tokens (B, L)``; ``answer (B, L)`` is true on answer tokens. A slot counts
    while every token of its block so far is one.
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
    samples: Sequence[Sample], spacing: float, most: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Random anchors, one in ``spacing`` answer positions and at most ``most`` a row.

    Returns ``anchors (B, A)`` rising in each row and ``real (B, A)``.
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


def pad(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """``tokens (B, L)``, padded on the right, and ``answer (B, L)``."""
    longest = max(len(s) for s in samples)
    tokens = np.zeros((len(samples), longest), dtype=np.int32)
    answer = np.zeros((len(samples), longest), dtype=bool)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample)] = sample.tokens
        answer[row, sample.start : len(sample)] = True
    return tokens, answer


def plan_batches(
    samples: Sequence[Sample], batch_tokens: int, rng: np.random.Generator
) -> list[list[int]]:
    """Indices of samples in random batches of like lengths, each within ``batch_tokens`` padded.

    Samples are shuffled, sorted by length within windows only, and the batches
    shuffled again, so that a pass stays random while padding stays small.
    """
    order = rng.permutation(len(samples))
    batches: list[list[int]] = []
    window = 256
    for begin in range(0, len(order), window):
        by_length = sorted(order[begin : begin + window].tolist(), key=lambda i: len(samples[i]))
        batch: list[int] = []
        for index in by_length:
            if batch and len(samples[index]) * (len(batch) + 1) > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(index)
        batches.append(batch)
    return [batches[i] for i in rng.permutation(len(batches))]
