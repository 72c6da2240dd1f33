"""The loss by hand: its gradient, the mass outside a draft vocabulary, and odd inputs."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from dspark_mlx.training.loss import divergences, dspark_loss
from dspark_mlx.training.train_options import LossWeights


def inputs(seed: int = 0, slots: int = 7, vocab: int = 11) -> tuple[mx.array, mx.array, mx.array]:
    rng = np.random.default_rng(seed)
    logits = mx.array(rng.normal(0, 2, (slots, vocab)).astype(np.float32))
    teacher = mx.softmax(mx.array(rng.normal(0, 2, (slots, vocab + 5)).astype(np.float32)), -1)
    labels = rng.integers(0, vocab, slots)
    labels[2] = -1
    return logits, teacher[:, :vocab], mx.array(labels.astype(np.int32))


def test_the_gradient_by_hand_is_the_automatic_one() -> None:
    logits, teacher, labels = inputs()
    weights = mx.array(np.random.default_rng(1).uniform(0, 1, (2, 7)).astype(np.float32))

    def by_hand(z: mx.array) -> mx.array:
        entropy, variation = divergences(z, teacher, labels)
        return (entropy * weights[0] + variation * weights[1]).sum()

    def automatic(z: mx.array) -> mx.array:
        logp = z - mx.logsumexp(z, axis=-1, keepdims=True)
        picked = mx.take_along_axis(logp, mx.maximum(labels, 0)[:, None], axis=-1)[:, 0]
        entropy = mx.where(labels >= 0, -picked, 0.0)
        variation = mx.abs(mx.exp(logp) - teacher).sum(-1)
        return (entropy * weights[0] + variation * weights[1]).sum()

    gap = mx.abs(mx.grad(by_hand)(logits) - mx.grad(automatic)(logits)).max()
    assert gap.item() < 1e-5


def test_mass_outside_the_draft_vocabulary_counts_as_rejected() -> None:
    logits, teacher, labels = inputs()
    _, variation = divergences(logits, teacher, labels)
    draft = np.array(mx.softmax(logits, axis=-1))
    accept = np.minimum(draft, np.array(teacher)).sum(-1)
    assert np.abs((1 - np.array(variation) / 2) - accept).max() < 1e-5


def test_a_label_outside_the_vocabulary_has_no_cross_entropy() -> None:
    logits, teacher, labels = inputs()
    entropy, _ = divergences(logits, teacher, labels)
    assert entropy[2].item() == 0 and mx.all(entropy[mx.array([0, 1, 3])] > 0).item()


def test_extreme_logits_stay_finite() -> None:
    logits = mx.array([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]])
    teacher = mx.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])

    def total(z: mx.array, c: mx.array) -> mx.array:
        one = mx.ones(2)
        return dspark_loss(z, c, teacher, mx.array([1, 0]), one, LossWeights()).total

    value, gradient = mx.value_and_grad(total, argnums=(0, 1))(logits, mx.array([1e4, -1e4]))
    assert mx.isfinite(value).item()
    assert all(mx.all(mx.isfinite(g)).item() for g in gradient)


def test_shares_of_a_batch_add_up_to_its_loss() -> None:
    logits, teacher, labels = inputs()
    weights, scale = mx.arange(1, 8).astype(mx.float32), LossWeights()
    whole = dspark_loss(logits, None, teacher, labels, weights, scale).total.item()
    parts = sum(
        dspark_loss(
            logits[s], None, teacher[s], labels[s], weights[s], scale, weights.sum()
        ).total.item()
        for s in (slice(0, 3), slice(3, 7))
    )
    assert abs(whole - parts) < 1e-6
