"""non_anticipating: no token helps to decide whether it is verified.

Policies are tested with their own arithmetic; here is what the rest of the
engine owes them: confidences that know nothing of their own token, draws that
older rounds have not seen, and the truth about which replies may be decided on
freely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from decoding import HEADS, dspark, make_engine, plain_text, request, run, toy_target
from tables import NoEnd, TableDrafter, chi_square, law, table_target
from toys import prompt

from dspark_mlx.draft import Draft, DraftRow
from dspark_mlx.draft.lookup import LookupProposer
from dspark_mlx.events import StepDone
from dspark_mlx.model.sampling import probabilities
from dspark_mlx.request import Cuts, Request, SamplingParams
from dspark_mlx.schedule import POLICIES
from dspark_mlx.schedule.policy import Outcome, Plan, RowView, Schedule

VOCAB, TEXT = 4, 3


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, draft_sampling="probabilistic")


def drafted_and_confident(
    head: str | None, seeds: Sequence[int], **options: Any
) -> list[tuple[list[int], list[float]]]:
    """Drafts from one and the same context with different random draws."""
    target = toy_target("llama")
    text = prompt(12)
    proposer = dspark(target, head=head, block=5, **options)
    row = proposer.new_row()
    _, features = target.forward(mx.array([text[:-1]]), target.make_rows(), proposer.spec.taps)
    proposer.prefill(row, text[:-1], features)
    proposer.extend(row)
    drafts = []
    for seed in seeds:
        draft = proposer.propose([DraftRow(text[-1], len(text), sampled(seed), 5)])
        drafts.append((draft.token_rows()[0], draft.confidence_rows()[0]))
    return drafts


@pytest.mark.parametrize("options", [{}, {"reduced": True}, {"confidence": False}], ids=str)
@pytest.mark.parametrize("head", HEADS, ids=str)
def test_a_confidence_depends_on_the_tokens_before_its_own_only(
    head: str | None, options: dict[str, bool]
) -> None:
    drafts = drafted_and_confident(head, range(25), **options)
    differ = set()
    for tokens, confidence in drafts:
        for others, theirs in drafts:
            shared = next((k for k in range(5) if tokens[k] != others[k]), 5)
            same = min(shared + 1, 5)  # c_1 .. c_{shared + 1}
            assert confidence[:same] == pytest.approx(theirs[:same], abs=1e-6)
            if same < 5 and abs(confidence[same] - theirs[same]) > 1e-6:
                differ.add(same)
    # and it does depend on those, where the head reads them
    assert bool(differ) == (head is not None and options.get("confidence", True))


class Older:
    """Verifies one token or none, by what an older round believed of the position after next.

    It acts on older rounds only, as a policy may. It is built to catch draws that
    are used twice: the belief it acts on followed from a draft at the very position
    it now decides about.
    """

    name = "older"

    def __init__(self) -> None:
        self.believed: dict[str, float] = {}

    def plan(self, rows: Sequence[RowView]) -> Plan:
        return Plan(tuple(row.cap for row in rows), False)

    def schedule(
        self, rows: Sequence[RowView], drafted: Sequence[int], confidence: Any
    ) -> Schedule:
        lengths = tuple(
            min(n, int(self.believed.get(row.request_id, 0.0) > 0.5))
            for row, n in zip(rows, drafted, strict=True)
        )
        return Schedule(lengths, ("",) * len(rows))

    def observe(self, outcome: Outcome) -> None:
        for row, chances, taken in zip(
            outcome.rows, outcome.confidence, outcome.committed, strict=True
        ):
            self.believed[row.request_id] = chances[taken + 1] if len(chances) > taken + 1 else 0.0


class Peeking:
    """Verifies the first token only when the second is believed in: what is not allowed."""

    name = "peeking"

    def plan(self, rows: Sequence[RowView]) -> Plan:
        return Plan(tuple(row.cap for row in rows), True)

    def schedule(
        self, rows: Sequence[RowView], drafted: Sequence[int], confidence: Any
    ) -> Schedule:
        lengths = tuple(int(len(c) > 1 and c[1] > 0.5) for c in confidence or [()] * len(rows))
        return Schedule(lengths, ("",) * len(rows))

    def observe(self, outcome: Outcome) -> None: ...


def deviation(policy: Callable[[], Any], position: int, replies: int = 480) -> tuple[float, float]:
    """How far the token at ``position`` is from the target's law, and what chance allows."""
    p = np.array([0.6, 0.2, 0.1, 0.1])
    target = table_target(VOCAB)
    target.model.table = mx.array(np.log(np.tile(p, (VOCAB, 1))).astype(np.float32))
    uniform = np.zeros((VOCAB, VOCAB))
    counts = np.zeros(VOCAB)
    for first in range(0, replies, 80):
        engine = make_engine(
            target,
            [TableDrafter(uniform, 4)],
            policy=policy(),
            tokenizer=NoEnd(),
            max_rows=80,
            reuse=False,
        )
        asked = [
            Request(str(i), tokens=(0,), max_tokens=4, sampling=sampled(7919 * i))
            for i in range(first, first + 80)
        ]
        for ran in run(engine, *asked).values():
            counts[ran.tokens[position]] += 1
    return chi_square(counts, replies * p)


def test_a_position_drafted_again_is_drawn_anew() -> None:
    # Even tokens make TableDrafter believe in what follows them.
    statistic, bound = deviation(Older, 1)
    assert statistic < bound


def test_a_policy_that_peeks_would_be_noticed() -> None:
    statistic, bound = deviation(Peeking, 0)
    assert statistic > bound


def test_drafts_at_one_position_differ_from_round_to_round() -> None:
    target = table_target(8)
    proposer = TableDrafter(np.zeros((8, 8)), 6)
    first = proposer.propose([DraftRow(0, 10, sampled(3), 6)]).token_rows()[0]
    later = proposer.propose([DraftRow(0, 11, sampled(3), 6)]).token_rows()[0]
    assert first == proposer.propose([DraftRow(0, 10, sampled(3), 6)]).token_rows()[0]
    assert first[1:] != later[:-1]
    assert target.vocab_size == 8


@pytest.mark.parametrize("name", [n for n in POLICIES if n not in ("off", "fixed", "threshold")])
@pytest.mark.parametrize("proposer", ["dspark", "made-up"])
def test_every_policy_keeps_the_law_of_independent_drafts(name: str, proposer: str) -> None:
    """Confidences that follow from the drafted tokens, and rows of one batch side by side.

    Whatever the proposer is called: what counts is that it declares ``samples_drafts``.
    """
    target = table_target(VOCAB, seed=5)
    drafter = np.random.default_rng(2).normal(0.0, 1.5, (VOCAB, VOCAB))
    replies = 320
    counts = np.zeros((VOCAB,) * TEXT)
    for first in range(0, replies, 32):
        engine = make_engine(
            target,
            [TableDrafter(drafter, 4, proposer)],
            policy=name,
            tokenizer=NoEnd(),
            max_rows=32,
            reuse=False,
        )
        asked = [
            Request(str(i), tokens=(1,), max_tokens=TEXT + 2, sampling=sampled(104729 * i))
            for i in range(first, first + 32)
        ]
        for ran in run(engine, *asked).values():
            counts[tuple(ran.tokens[:TEXT])] += 1
    expected = replies * law(target, lambda t: probabilities(t, sampled(0)), 1, TEXT)
    statistic, bound = chi_square(counts, expected)
    assert statistic < bound


@pytest.mark.parametrize(
    ("sampling", "options", "method", "free"),
    [
        (SamplingParams(), {}, "dspark", True),
        (SamplingParams(temperature=1.0), {}, "dspark", True),
        (SamplingParams(temperature=1.0, draft_sampling="greedy"), {}, "dspark", True),
        (sampled(1), {}, "dspark", False),
        (sampled(1), {"sampler": lambda p: mx.argmax(p, axis=-1)}, "dspark", True),
        (sampled(1), {}, "lookup", True),
        (sampled(1), {}, "none", True),
    ],
)
def test_policies_are_told_which_replies_no_decision_can_change(
    sampling: SamplingParams, options: dict[str, Any], method: Any, free: bool
) -> None:
    target = toy_target("llama")
    told: list[bool] = []

    class Listening:
        name = "listening"

        def plan(self, rows: Sequence[RowView]) -> Plan:
            told.extend(row.schedule_invariant for row in rows)
            return Plan(tuple(row.cap for row in rows), False)

        def schedule(self, rows: Any, drafted: Sequence[int], confidence: Any) -> Schedule:
            return Schedule(tuple(drafted), ("",) * len(rows))

        def observe(self, outcome: Outcome) -> None: ...

    proposers = [dspark(target), LookupProposer()]
    engine = make_engine(target, proposers, policy=Listening())
    run(engine, request(sampling=sampling, method=method, **options))
    assert told and set(told) == {free}


@pytest.mark.parametrize("samples_drafts", [False, True])
def test_what_a_proposer_declares_decides_and_not_its_name(samples_drafts: bool) -> None:
    target = table_target(VOCAB)
    drafter = TableDrafter(np.zeros((VOCAB, VOCAB)), 4, "made-up")
    drafter.spec = replace(drafter.spec, samples_drafts=samples_drafts)
    engine = make_engine(target, [drafter], tokenizer=NoEnd())
    views: list[RowView] = []
    plan = engine.policy.plan
    engine.policy.plan = lambda rows: views.extend(rows) or plan(rows)  # type: ignore[method-assign,func-returns-value]
    run(engine, Request("a", tokens=(0,), max_tokens=4, sampling=sampled(1)))
    assert {view.schedule_invariant for view in views} == {not samples_drafts}


def test_distributions_come_with_independent_drafts_only() -> None:
    """Rejection needs q exactly where a token was drawn from it."""
    target = toy_target("llama")
    text = prompt(12)
    seen: list[Draft] = []
    proposer = dspark(target)
    propose = proposer.propose

    def watch(rows: Sequence[DraftRow]) -> Draft:
        seen.append(propose(rows))
        return seen[-1]

    proposer.propose = watch  # type: ignore[method-assign]
    for sampling, independent in (
        (SamplingParams(), False),
        (SamplingParams(temperature=0.5), False),
        (SamplingParams(temperature=0.5, draft_sampling="greedy"), False),
        (SamplingParams(temperature=0.5, draft_sampling="probabilistic"), True),
    ):
        seen.clear()
        run(make_engine(target, [proposer]), request(tokens=tuple(text), sampling=sampling))
        for draft in seen:
            (q,) = draft.q
            assert (q is not None) == independent
            if q is not None:
                assert q.shape == (draft.counts[0], target.vocab_size)
                assert np.array(q).sum(-1) == pytest.approx(1.0, abs=1e-5)
                drawn = mx.take_along_axis(q, draft.tokens[0][:, None], axis=1)
                assert float(drawn.min()) > 0


def test_one_reply_s_verification_is_not_another_s() -> None:
    """Rows of a batch keep their own cuts: the schedule of one row binds no other."""
    target = toy_target("llama")
    lessons = [[*prompt(12, i), *plain_text("llama", tuple(prompt(12, i)), 24)] for i in (0, 1)]
    engine = make_engine(target, [dspark(target, lessons=lessons)])
    asked = [
        request("a", seed=0, cuts=Cuts(draft_length=1), ignore_eos=True),
        request("b", seed=1, cuts=Cuts(draft_length=4), ignore_eos=True),
    ]
    widest: dict[str, int] = {}
    for r in asked:
        engine.submit(r)
    while engine.active:
        for event in engine.step():
            if isinstance(event, StepDone):
                for row in event.rows:
                    widest[row.request_id] = max(widest.get(row.request_id, 0), row.scheduled)
    assert widest == {"a": 1, "b": 4}
