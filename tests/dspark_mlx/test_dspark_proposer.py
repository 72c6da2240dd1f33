"""The DSpark proposer's context equals a fresh one, whatever rounds came before."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
import toys
from drafter_toys import toy_drafter

from dspark_mlx.draft import Draft, DraftRow
from dspark_mlx.draft.dspark.calibration import DraftCalibration, Scale
from dspark_mlx.draft.dspark.network import Drafter
from dspark_mlx.draft.dspark.pairing import attach_target
from dspark_mlx.draft.dspark.proposer import DSparkProposer, peak_logits
from dspark_mlx.engine.engine import Engine
from dspark_mlx.events import StepDone
from dspark_mlx.model.target import Target
from dspark_mlx.request import Request, SamplingParams
from dspark_mlx.schedule import Outcome, Plan, RowView, Schedule

TAPS = (-1, 0, 1)


class Moody:
    """Drafts in some rounds and decodes plainly in others, at random."""

    name = "moody"

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def plan(self, rows: Sequence[RowView]) -> Plan:
        drafts = bool(self.rng.random() < 0.5)
        return Plan(tuple(row.cap if drafts else 0 for row in rows), needs_confidence=False)

    def schedule(
        self,
        rows: Sequence[RowView],
        drafted: Sequence[int],
        confidence: Sequence[Sequence[float]] | None,
    ) -> Schedule:
        lengths = tuple(int(self.rng.integers(0, n + 1)) for n in drafted)
        return Schedule(lengths, ("",) * len(rows))

    def observe(self, outcome: Outcome) -> None:
        pass


def pair(seed: int = 0) -> tuple[Target, Drafter]:
    target = toys.target("llama", seed=seed)
    drafter = toy_drafter(seed, target_layer_ids=TAPS, num_target_layers=2, block_size=4)
    attach_target(drafter, target)
    return target, drafter


def fresh_draft(target: Target, drafter: Drafter, tokens: Sequence[int], width: int) -> list[int]:
    """The draft behind ``tokens`` from a context built in one go."""
    _, features = target.forward(mx.array([tokens[:-1]]), target.make_rows(), TAPS)
    context = drafter.make_context()
    drafter.extend(features, context)
    out = drafter.draft(mx.array([tokens[-1]]), context, width=width)
    drafted: list[int] = out.tokens[0].tolist()
    return drafted


@pytest.mark.parametrize("seed", range(3))
def test_drafts_after_plain_rounds_joins_and_leaves_are_those_of_a_fresh_context(
    seed: int,
) -> None:
    target, drafter = pair()
    proposer = DSparkProposer(drafter, target.vocab_size)
    engine = Engine(
        target, toys.ToyTokenizer(), [proposer], Moody(seed), default_method="dspark", max_rows=3
    )
    waiting = {f"r{i}": toys.prompt(3 + 11 * i, seed=i) for i in range(5)}
    texts: dict[str, list[int]] = {}
    compared = 0
    step = 0
    while engine.active or waiting:
        if waiting and step % 4 == 0:
            name = next(iter(waiting))
            texts[name] = list(waiting.pop(name))
            length = 12 + 3 * len(texts)
            engine.submit(
                Request(name, tokens=tuple(texts[name]), max_tokens=length, ignore_eos=True)
            )
        for event in engine.step():
            if not isinstance(event, StepDone):
                continue
            for row in event.rows:
                text = texts[row.request_id]
                if row.drafted:
                    want = fresh_draft(target, drafter, text, len(row.drafted))
                    assert list(row.drafted) == want
                    compared += 1
                text += [t.id for t in row.tokens]
        step += 1
    assert compared > 15
    for name, text in texts.items():
        prompt = toys.prompt(3 + 11 * int(name[1:]), seed=int(name[1:]))
        assert text == prompt + toys.plain_greedy(target.model, prompt, len(text) - len(prompt))


def test_a_prompt_of_one_token_has_an_empty_context() -> None:
    target, drafter = pair()
    proposer = DSparkProposer(drafter, target.vocab_size)
    engine = Engine(
        target, toys.ToyTokenizer(), [proposer], Moody(0), default_method="dspark", max_rows=1
    )
    engine.submit(Request("one", tokens=(5,), max_tokens=20, ignore_eos=True))
    tokens: list[int] = []
    while engine.active:
        for event in engine.step():
            if isinstance(event, StepDone):
                tokens += [t.id for t in event.rows[0].tokens]
    assert tokens == toys.plain_greedy(target.model, [5], 20)


def test_ids_the_target_does_not_have_are_never_drafted() -> None:
    """A drafter padded to more rows than the target's logits."""
    target, _ = pair()
    drafter = toy_drafter(3, target_layer_ids=TAPS, vocab_size=104, mask_token_id=103)
    scale = Scale((1.0,) * drafter.block_size, (0.0,) * drafter.block_size)
    drafter.calibration = DraftCalibration(scale, scale)
    proposer = DSparkProposer(drafter, target.vocab_size)
    row = proposer.new_row()
    _, features = target.forward(mx.array([[3, 4, 5]]), target.make_rows(), TAPS)
    proposer.prefill(row, [3, 4, 5], features)
    proposer.extend(row)
    for params in (
        SamplingParams(),
        SamplingParams(temperature=3.0, seed=1),
        SamplingParams(temperature=3.0, seed=1, draft_sampling="probabilistic"),
    ):
        draft = proposer.propose([DraftRow(7, 4, params, drafter.block_size)])
        assert int(draft.tokens.max().item()) < target.vocab_size
        if draft.q[0] is not None:
            assert draft.q[0].shape == (drafter.block_size, target.vocab_size)


@pytest.mark.parametrize("sampling", ["coupled", "probabilistic"])
def test_a_confidence_knows_nothing_of_its_own_token(sampling: str) -> None:
    """Also where it weighs how decided the drafter was: appendix A's condition on c_k."""
    target, drafter = pair()
    block = drafter.block_size
    scale = Scale((1.0,) * block, (0.0,) * block, (0.7,) * block)
    drafter.calibration = DraftCalibration(scale, scale)
    _, features = target.forward(mx.array([[3, 4, 5]]), target.make_rows(), TAPS)
    told: dict[tuple[int, ...], set[float]] = {}
    seen: dict[tuple[int, ...], set[int]] = {}
    for seed in range(40):
        proposer = DSparkProposer(drafter, target.vocab_size)
        row = proposer.new_row()
        proposer.prefill(row, [3, 4, 5], features)
        proposer.extend(row)
        params = SamplingParams(temperature=8.0, seed=seed, draft_sampling=sampling)
        draft = proposer.propose([DraftRow(7, 4, params, block)])
        [tokens], [confidence] = draft.token_rows(), draft.confidence_rows()
        for k in range(2):
            told.setdefault(tuple(tokens[:k]), set()).add(round(confidence[k], 5))
            seen.setdefault(tuple(tokens[:k]), set()).add(tokens[k])
    assert len(seen[()]) > 2, "the seeds draw different tokens"
    assert all(len(values) == 1 for values in told.values())


def test_a_peak_is_the_logit_of_the_largest_probability() -> None:
    logits = mx.random.normal((2, 3, 50)) * 3
    top = mx.softmax(logits, axis=-1).max(axis=-1)
    assert mx.allclose(mx.sigmoid(peak_logits(logits)), top, atol=1e-5)
    certain = mx.array([[[0.0, 500.0, 0.0]], [[0.0, 0.0, 0.0]]])
    high, low = peak_logits(certain)[:, 0].tolist()
    assert high > 13.0 and low == pytest.approx(np.log(0.5), abs=1e-5)


def test_a_confidence_that_is_no_number_is_none() -> None:
    """Damaged weights must cost speed, not the reply."""
    confidence = mx.array([[float("nan"), 0.5], [0.25, float("nan")]])
    draft = Draft(mx.zeros((2, 2), dtype=mx.int32), (2, 1), confidence, (None, None))
    assert draft.confidence_rows() == [[0.0, 0.5], [0.25]]
