"""lossless_sampling: at a temperature, the law of the text is the target's, whatever is drafted.

Greedy and coupled drafts leave even the text itself unchanged for a seed.
Independent drafts are judged by rejection; the algebra of that is enumerated
exactly through ``verify`` itself, and whole replies are counted besides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from decoding import dspark, make_engine, plain_text, request, run, run_one, toy_target
from mlx_lm.sample_utils import make_sampler
from tables import NoEnd, TableDrafter, chi_square, law, table_target
from toys import MODELS, prompt

import dspark_mlx.model.verify as verification
from dspark_mlx.draft.copying import CopyFirst
from dspark_mlx.draft.lookup import LookupProposer
from dspark_mlx.model.sampling import Purpose, gumbel, key, log_weights, probabilities, uniform
from dspark_mlx.model.verify import RowSpec, verify
from dspark_mlx.request import Cuts, Request, SamplingParams

FILTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": {"temperature": 0.6},
    "hot": {"temperature": 2.5},
    "top-p": {"top_p": 0.8},
    "top-k": {"top_k": 3},
    "min-p": {"min_p": 0.15},
    "all": {"temperature": 0.8, "top_p": 0.9, "top_k": 4, "min_p": 0.05},
}


def params(name: str = "plain", **more: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "seed": 1} | FILTERS[name] | more))


# -- the exact law of rejection, read out of ``verify`` ---------------------------------------


class Rejection:
    """What ``verify`` does with one drafted token x ~ q against p, found by bisection.

    The two random draws inside are replaced by numbers under our control; where
    its decision turns is then exactly the probability it decides with.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, p: np.ndarray, q: np.ndarray) -> None:
        self.p, self.q, self.vocab = p, q, len(p)
        self._u: list[float] = []
        self._noise: list[np.ndarray] = []
        monkeypatch.setattr(verification, "uniform", lambda seed, *_: mx.array(self._u[seed]))
        monkeypatch.setattr(
            verification,
            "gumbel",
            lambda vocab, seed, *_: mx.array(self._noise[seed].astype(np.float32)),
        )

    def _ask(self, tokens: list[int], u: list[float], noise: list[np.ndarray]) -> Any:
        """One row per entry; returns (accepted (n,), token (n,))."""
        self._u, self._noise = u, noise
        with np.errstate(divide="ignore"):
            two = np.log(np.stack([self.p, np.full(self.vocab, 1 / self.vocab)]))
        logits = mx.array(np.stack([two] * len(tokens)).astype(np.float32))
        q = mx.array(self.q[None].astype(np.float32))
        rows = [
            RowSpec(SamplingParams(temperature=1.0, seed=i), position=7, length=1, q=q)
            for i in range(len(tokens))
        ]
        verdict = verify(mx.array(tokens)[:, None], logits, rows)
        return np.array(verdict.accepted), np.array(verdict.token)

    def acceptance(self) -> np.ndarray:
        """P(accepted | x) for each x that q can draw; nan for the others."""
        drawn = [x for x in range(self.vocab) if self.q[x] > 0]
        low, high = np.zeros(len(drawn)), np.ones(len(drawn))
        for _ in range(24):
            middle = (low + high) / 2
            accepted, _ = self._ask(drawn, middle.tolist(), [np.zeros(self.vocab)] * len(drawn))
            low, high = np.where(accepted, middle, low), np.where(accepted, high, middle)
        chance = np.full(self.vocab, np.nan)
        chance[drawn] = high
        return chance

    def replacement(self, x: int) -> np.ndarray:
        """The law of the token that replaces a rejected x."""
        never = np.full(self.vocab, -1e9)
        (best,) = self._ask([x], [1.0], [np.zeros(self.vocab)])[1]
        low, high = np.full(self.vocab, -1.0), np.full(self.vocab, 60.0)
        for _ in range(34):
            middle = (low + high) / 2
            noise = []
            for j in range(self.vocab):
                one = never.copy()
                one[best], one[j] = 0.0, middle[j]
                noise.append(one)
            accepted, token = self._ask([x] * self.vocab, [1.0] * self.vocab, noise)
            assert not accepted.any()
            won = token == np.arange(self.vocab)
            low, high = np.where(won, low, middle), np.where(won, middle, high)
        ratio = np.where(high > 59, 0.0, np.exp(-high))
        ratio[best] = 1.0
        return ratio / ratio.sum()


@pytest.mark.parametrize("seed", range(6))
def test_rejection_emits_exactly_the_targets_law(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    vocab = 5 + seed % 4
    p, q = rng.dirichlet(np.full(vocab, 0.7)), rng.dirichlet(np.full(vocab, 0.7))
    if seed % 2:  # filtered: each has tokens that the other lacks
        p[rng.integers(vocab)] = 0.0
        q[rng.integers(vocab)] = 0.0
        p, q = p / p.sum(), q / q.sum()
    judge = Rejection(monkeypatch, p, q)
    acceptance = judge.acceptance()
    emitted = np.zeros(vocab)
    for x in range(vocab):
        if q[x] == 0:
            continue
        assert acceptance[x] == pytest.approx(min(1.0, p[x] / q[x]), abs=1e-5)
        emitted[x] += q[x] * acceptance[x]
        if acceptance[x] < 1 - 1e-5:
            emitted += q[x] * (1 - acceptance[x]) * judge.replacement(x)
    assert emitted == pytest.approx(p, abs=1e-5)


@pytest.mark.parametrize("name", FILTERS)
def test_both_models_are_filtered_by_one_function(name: str) -> None:
    """What filters keep, renormalised; top-k and top-p by their textbook definitions."""
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 2, (7, 12))
    given = FILTERS[name]
    ours = np.array(probabilities(mx.array(logits.astype(np.float32)), params(name)))
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    keep = np.ones_like(p, dtype=bool)
    for r, row in enumerate(p):
        order = np.argsort(-row)
        if "top_p" in given:
            before = np.cumsum(row[order]) - row[order]
            keep[r, order[before >= given["top_p"]]] = False
        if "min_p" in given:
            keep[r] &= row >= given["min_p"] * row.max()
        if "top_k" in given:
            keep[r, order[given["top_k"] :]] = False
    kept = np.where(keep, p, 0.0) ** (1 / given.get("temperature", 1.0))
    assert ours == pytest.approx(kept / kept.sum(-1, keepdims=True), abs=1e-5)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_probabilities_are_float32_and_sum_to_one_at_150k_ids(dtype: mx.Dtype) -> None:
    logits = (mx.random.normal((3, 151_936), key=mx.random.key(0)) * 3).astype(dtype)
    for name in FILTERS:
        p = probabilities(logits, params(name))
        assert p.dtype == mx.float32
        sums = np.array(p, dtype=np.float64).sum(-1)
        assert sums == pytest.approx(1.0, abs=1e-3)  # MLX's CPU sums are good to 3e-4 at this size
        assert log_weights(logits, params(name)).dtype == mx.float32


# -- random draws -----------------------------------------------------------------------------


def test_no_two_draws_of_a_reply_share_a_key() -> None:
    for seed in (0, 1, 2**32 - 1, 2**32, 2**64 - 1):
        keys = [
            tuple(key(seed, position, purpose).tolist())
            for position in range(200)
            for purpose in Purpose
        ]
        keys += [
            tuple(key(seed, position, Purpose.DRAFT, slot).tolist())
            for position in range(200)
            for slot in range(1, 16)
        ]
        assert len(set(keys)) == len(keys)


def test_draws_are_what_they_are_called() -> None:
    n = 1500
    numbers = np.array(mx.stack([uniform(5, i, Purpose.ACCEPT) for i in range(n)]))
    assert numbers.min() >= 0 and numbers.max() < 1
    statistic, bound = chi_square(np.histogram(numbers, 20, (0, 1))[0], np.full(20, n / 20))
    assert statistic < bound
    p = np.array([0.5, 0.25, 0.15, 0.1, 0.0])
    with np.errstate(divide="ignore"):
        weights = mx.array(np.log(p).astype(np.float32))
    for purpose in Purpose:
        noise = mx.stack([gumbel(5, 11, i, purpose) for i in range(n)])
        counts = np.bincount(np.array(mx.argmax(weights + noise, axis=-1)), minlength=5)
        statistic, bound = chi_square(counts, n * p)
        assert statistic < bound


# -- whole replies, counted -------------------------------------------------------------------

VOCAB, TEXT = 5, 3


def count_texts(
    make: Callable[[], Any], ask: Callable[[int], Request], replies: int, rows: int = 60
) -> np.ndarray:
    """How often each text of ``TEXT`` tokens came, over seeds 0..replies-1."""
    counts = np.zeros((VOCAB,) * TEXT)
    for first in range(0, replies, rows):
        asked = [ask(seed) for seed in range(first, min(first + rows, replies))]
        for ran in run(make(), *asked).values():
            counts[tuple(ran.tokens[:TEXT])] += 1
    return counts


@pytest.mark.parametrize(
    ("name", "draft_sampling", "cuts"),
    [
        ("plain", "probabilistic", Cuts()),
        ("all", "probabilistic", Cuts()),
        ("hot", "probabilistic", Cuts(p_min=0.5)),
        ("top-p", "coupled", Cuts()),
    ],
    ids=["plain", "filtered", "hot and cut", "coupled"],
)
def test_the_law_of_replies_is_the_targets(name: str, draft_sampling: Any, cuts: Cuts) -> None:
    target = table_target(VOCAB)
    drafter = np.random.default_rng(9).normal(0.0, 1.2, (VOCAB, VOCAB))
    asked = params(name, draft_sampling=draft_sampling)

    def make() -> Any:
        return make_engine(
            target,
            [TableDrafter(drafter, 3)],
            policy="threshold",
            tokenizer=NoEnd(),
            max_rows=60,
            reuse=False,
        )

    def ask(seed: int) -> Request:
        sampling = params(name, draft_sampling=draft_sampling, seed=7919 * seed)
        return Request(str(seed), tokens=(2,), max_tokens=TEXT + 1, sampling=sampling, cuts=cuts)

    replies = 500
    counts = count_texts(make, ask, replies)
    expected = replies * law(target, lambda t: probabilities(t, asked), 2, TEXT)
    statistic, bound = chi_square(counts, expected)
    assert statistic < bound


def test_the_count_would_notice_a_wrong_law() -> None:
    """The test above has teeth: against the drafter's law, or another temperature, it fails."""
    target = table_target(VOCAB)

    def ask(seed: int) -> Request:
        return Request(str(seed), tokens=(2,), max_tokens=TEXT, sampling=params(seed=7919 * seed))

    counts = count_texts(
        lambda: make_engine(target, tokenizer=NoEnd(), max_rows=60, reuse=False), ask, 800
    )
    right = 800 * law(target, lambda t: probabilities(t, params()), 2, TEXT)
    statistic, bound = chi_square(counts, right)
    assert statistic < bound
    for wrong in (params("warm"), params("hot")):
        statistic, bound = chi_square(
            counts, 800 * law(target, lambda t, w=wrong: probabilities(t, w), 2, TEXT)
        )
        assert statistic > bound


@pytest.mark.parametrize("copies", [False, True], ids=["drafted", "copied"])
def test_a_real_drafters_independent_drafts_keep_the_law(copies: bool) -> None:
    """Two tokens behind a prompt, of a toy whose first two tokens' law can be computed."""
    target = toy_target("llama")
    tokens = tuple(prompt(9)) * (2 if copies else 1)
    sampling = {"temperature": 0.7, "top_k": 6, "draft_sampling": "probabilistic"}
    lesson = [*tokens, *plain_text("llama", tokens, 6)]
    proposer = dspark(target, block=2, reduced=True, lessons=[lesson])
    copied = 0
    replies, rows = 320, 40
    counts: dict[int, int] = {}
    for first in range(0, replies, rows):
        asked = [
            request(
                str(seed),
                tokens=tokens,
                max_tokens=2,
                ignore_eos=True,
                sampling=SamplingParams(**sampling, seed=104729 * seed),
            )
            for seed in range(first, first + rows)
        ]
        chosen = CopyFirst(proposer) if copies else proposer
        engine = make_engine(target, [chosen], max_rows=rows)
        for ran in run(engine, *asked).values():
            counts[ran.tokens[1]] = counts.get(ran.tokens[1], 0) + 1
            copied += ran.rounds[0].copied
    assert copied == (replies if copies else 0)
    asked_for = SamplingParams(**sampling)
    first_law = np.array(probabilities(target.model(mx.array([tokens]))[0, -1], asked_for))
    second = np.zeros_like(first_law, dtype=np.float64)
    for token in np.flatnonzero(first_law):
        logits = target.model(mx.array([[*tokens, int(token)]]))[0, -1]
        second += first_law[token] * np.array(probabilities(logits, asked_for))
    seen = np.zeros_like(second)
    for token, n in counts.items():
        seen[token] = n
    statistic, bound = chi_square(seen, replies * second / second.sum())
    assert statistic < bound


# -- one seed, one text -----------------------------------------------------------------------


@pytest.mark.parametrize("draft_sampling", ["coupled", "greedy"])
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_seed_gives_one_text_with_and_without_speculation(
    kind: str, name: str, draft_sampling: Any
) -> None:
    target = toy_target(kind)
    seed = 2**63 + 5
    sampling = params(name, seed=seed, draft_sampling=draft_sampling)
    ask = request(sampling=sampling, ignore_eos=True)
    own = run_one(make_engine(target), ask).tokens
    lesson = [*prompt(12), *own]
    for proposer in (
        dspark(target, block=4, lessons=[lesson]),
        dspark(target, block=6, head="rnn", reduced=True, lessons=[lesson]),
        LookupProposer(5),
    ):
        ran = run_one(make_engine(target, [proposer]), ask)
        assert ran.tokens == own
        assert ran.finished is not None and ran.finished.seed == seed


@pytest.mark.parametrize("kind", MODELS)
def test_a_seed_gives_one_text_alone_and_in_a_batch(kind: str) -> None:
    target = toy_target(kind)
    asked = [
        request(str(i), length=5 + 7 * i, seed=i, sampling=params("all", seed=50 + i))
        for i in range(4)
    ]
    alone = {r.id: run_one(make_engine(target), r).tokens for r in asked}
    lessons = [[*prompt(5 + 7 * i, i), *alone[str(i)]] for i in range(4)]
    batch = make_engine(target, [dspark(target, lessons=lessons)])
    together = run(batch, *asked[:2], later={3: asked[2:3], 6: asked[3:]})
    assert {id: ran.tokens for id, ran in together.items()} == alone


def test_coupled_drafts_agree_more_often_than_greedy_ones() -> None:
    """What the coupling is for: same noise, same choice, wherever the two models agree."""
    target = table_target(8, spread=0.5)
    accepted = {}
    for draft_sampling in ("coupled", "greedy", "probabilistic"):
        table = np.array(target.model.table) + np.random.default_rng(4).normal(0, 0.1, (8, 8))
        engine = make_engine(
            target, [TableDrafter(table, 3)], tokenizer=NoEnd(), max_rows=40, reuse=False
        )
        asked = [
            Request(
                str(i),
                tokens=(1,),
                max_tokens=12,
                sampling=params(seed=i, draft_sampling=draft_sampling),  # type: ignore[arg-type]
            )
            for i in range(40)
        ]
        ran = run(engine, *asked).values()
        accepted[draft_sampling] = sum(r.finished.accepted for r in ran if r.finished)
    assert accepted["coupled"] > 2 * accepted["greedy"]
    assert accepted["probabilistic"] > 2 * accepted["greedy"]


def test_independent_drafts_repeat_with_their_seed() -> None:
    target = toy_target("llama")
    ask = request(sampling=params(seed=8, draft_sampling="probabilistic"), ignore_eos=True)
    lesson = [*prompt(12), *run_one(make_engine(target), ask).tokens]
    first, again = (
        run_one(make_engine(target, [dspark(target, lessons=[lesson])]), ask).tokens
        for _ in range(2)
    )
    other = request(sampling=params(seed=9, draft_sampling="probabilistic"), ignore_eos=True)
    assert first == again
    assert run_one(make_engine(target, [dspark(target)]), other).tokens != first


def test_a_missing_seed_is_drawn_and_told() -> None:
    target = toy_target("llama")
    ask = request(sampling=SamplingParams(temperature=1.0), ignore_eos=True)
    first = run_one(make_engine(target), ask)
    assert first.finished is not None and first.finished.seed is not None
    told = SamplingParams(temperature=1.0, seed=first.finished.seed)
    again = run_one(make_engine(target), request(sampling=told, ignore_eos=True))
    assert again.tokens == first.tokens
    assert SamplingParams().seed != SamplingParams().seed


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-39, 1e-300])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    target = toy_target("llama")
    own = plain_text("llama", tuple(prompt(12)), 24)
    for proposers in ([], [dspark(target)]):
        ask = request(sampling=SamplingParams(temperature=temperature), ignore_eos=True)
        assert tuple(run_one(make_engine(target, proposers), ask).tokens) == own


# -- mlx-lm's samplers ------------------------------------------------------------------------


def test_mlx_lms_samplers_keep_their_law_under_speculation() -> None:
    target = table_target(VOCAB)
    sampler = make_sampler(temp=0.8, top_p=0.9)
    mx.random.seed(0)

    def ask(seed: int) -> Request:
        return Request(str(seed), tokens=(2,), max_tokens=TEXT + 1, sampler=sampler)

    drafter = np.array(target.model.table)
    replies = 500
    counts = count_texts(
        lambda: make_engine(
            target, [TableDrafter(drafter, 3)], tokenizer=NoEnd(), max_rows=60, reuse=False
        ),
        ask,
        replies,
    )
    same = SamplingParams(temperature=0.8, top_p=0.9)
    expected = replies * law(target, lambda t: probabilities(t, same), 2, TEXT)
    statistic, bound = chi_square(counts, expected)
    assert statistic < bound


@pytest.mark.parametrize("kind", MODELS)
def test_a_greedy_sampler_is_greedy_decoding(kind: str) -> None:
    target = toy_target(kind)
    own = plain_text(kind, tuple(prompt(12)), 24)
    ask = request(sampler=lambda logprobs: mx.argmax(logprobs, axis=-1), ignore_eos=True)
    for proposers in ([], [dspark(target, lessons=[[*prompt(12), *own]])]):
        assert tuple(run_one(make_engine(target, proposers), ask).tokens) == own
