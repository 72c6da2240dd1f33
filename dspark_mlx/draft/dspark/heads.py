"""The sequential head: what makes slot k depend on the token drafted at k - 1.

Each head adds a bias to the backbone's logits. It is low-rank: a latent of rank
R is made from the previous token (and, gated or recurrent, from the slot's
hidden state), then projected to the draft vocabulary. All three work on any
leading shape, one slot at a time while drafting and whole teacher-forced blocks
while training, through the same ``latent``. Names and shapes follow DeepSpec's
checkpoints. Heads know nothing of sampling.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .config import DrafterConfig


class MarkovHead(nn.Module):
    """Vanilla: ``bias_k = W2 W1[x_{k-1}]``, W1 over the target's ids, W2 over the draft's."""

    def __init__(self, vocab_size: int, logit_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2: nn.Module = nn.Linear(rank, logit_size, bias=False)

    def embed(self, previous: mx.array) -> mx.array:
        """``W1[x]``: target ids ``(...)`` to ``(..., R)``. Ids past the table read its last row."""
        last = self.markov_w1.weight.shape[0] - 1
        return self.markov_w1(mx.minimum(previous, last))

    def start(self, shape: tuple[int, ...]) -> mx.array | None:
        """The state before slot 0, for leading shape ``shape``."""
        return None

    def latent(
        self, previous: mx.array, hidden: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """One slot: ``previous (...)``, ``hidden (..., H)`` to ``(..., R)`` and the next state."""
        return self.embed(previous), state

    def bias(
        self, previous: mx.array, hidden: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """One slot's bias ``(..., Vd)`` and the next state."""
        latent, state = self.latent(previous, hidden, state)
        return self.markov_w2(latent), state

    def block_bias(self, previous: mx.array, hidden: mx.array) -> mx.array:
        """Teacher-forced: ``previous (..., G)``, ``hidden (..., G, H)`` to ``(..., G, Vd)``."""
        return self.markov_w2(self.latent(previous, hidden, None)[0])


class GatedMarkovHead(MarkovHead):
    """The latent is gated by ``sigmoid(gate_proj([h_k ; W1[x_{k-1}]]))``."""

    def __init__(self, vocab_size: int, logit_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, logit_size, rank, hidden_size)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def latent(
        self, previous: mx.array, hidden: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        embedded = self.embed(previous)
        gate = mx.sigmoid(self.gate_proj(mx.concatenate([hidden, embedded], axis=-1)))
        return gate * embedded, state


class RNNHead(MarkovHead):
    """A gated recurrence over the block's tokens.

    ``joint_proj([s_{k-1} ; W1[x_{k-1}] ; h_k])`` gives a gate, a candidate and an
    output, R each; ``s_k = g s_{k-1} + (1 - g) tanh(candidate)`` with ``s = 0``
    before the block, and the latent is ``tanh(output)``.
    """

    def __init__(self, vocab_size: int, logit_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, logit_size, rank, hidden_size)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def start(self, shape: tuple[int, ...]) -> mx.array:
        table = self.markov_w1.weight
        return mx.zeros((*shape, table.shape[1]), dtype=table.dtype)

    def latent(
        self, previous: mx.array, hidden: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        if state is None:
            state = self.start(previous.shape)
        joint = self.joint_proj(mx.concatenate([state, self.embed(previous), hidden], axis=-1))
        gate, candidate, output = mx.split(joint, 3, axis=-1)
        gate = mx.sigmoid(gate)
        return mx.tanh(output), gate * state + (1 - gate) * mx.tanh(candidate)

    def block_bias(self, previous: mx.array, hidden: mx.array) -> mx.array:
        state: mx.array | None = None
        latents = []
        for k in range(previous.shape[-1]):
            latent, state = self.latent(previous[..., k], hidden[..., k, :], state)
            latents.append(latent)
        return self.markov_w2(mx.stack(latents, axis=-2))


HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RNNHead}


def make_head(config: DrafterConfig) -> MarkovHead | None:
    """The head a config asks for; None where slots are independent of each other."""
    if config.markov_head_type is None:
        return None
    return HEADS[config.markov_head_type](
        config.vocab_size, config.logit_size, config.markov_rank, config.hidden_size
    )
