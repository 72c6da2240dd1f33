"""Algorithm 1, against a transcription in plain arithmetic, and its exact losslessness."""

import itertools
from fractions import Fraction as F

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_mlx.schedule import Auto, CostModel, EarlyStop, Lagged
from dspark_mlx.schedule.paper import prefix_schedule
from dspark_mlx.schedule.policy import Outcome, RowView

SPS = {1: 1.0, 2: 0.5, 3: 0.45}  # appendix A


def seconds_of(sps):
    return lambda batch, _: 1.0 / sps[batch]


def test_the_paper_s_example_stops_where_appendix_a_says():
    assert prefix_schedule([[0.8, 0.72]], seconds_of(SPS)) == (0,)
    assert prefix_schedule([[0.8, 0.0]], seconds_of(SPS)) == (0,)


def test_rows_are_admitted_by_survival():
    sps = {2: 10.0, 3: 9.0, 4: 8.0, 5: 7.0, 6: 5.0}
    assert prefix_schedule([[0.9, 0.81], [0.8, 0.4]], seconds_of(sps)) == (2, 1)


def survivals(rows=4, width=5):
    chance = st.lists(st.floats(0, 1), min_size=0, max_size=width)
    return st.lists(chance.map(lambda c: np.cumprod(c).tolist()), min_size=1, max_size=rows)


@given(survivals(), st.lists(st.floats(0.01, 1.0), min_size=25, max_size=25))
def test_early_stop_is_a_prefix_of_the_greedy_path(rows, steps):
    """Lengths are those after the last rise of throughput before its first fall."""
    price = np.cumsum(steps)
    lengths = prefix_schedule(rows, lambda batch, _: price[batch])
    path = sorted((-a, r, j) for r, row in enumerate(rows) for j, a in enumerate(row, 1) if a > 0)
    expected, batch, best = float(len(rows)), len(rows), len(rows) / price[len(rows)]
    admitted = 0
    for minus_a, _, _ in path:
        expected, batch = expected - minus_a, batch + 1
        if expected / price[batch] <= best:
            break
        best = expected / price[batch]
        admitted += 1
    assert sum(lengths) == admitted
    for r, row in enumerate(rows):
        mine = {j for _, s, j in path[:admitted] if s == r}
        assert mine == set(range(1, lengths[r] + 1)) and lengths[r] <= len(row)


# -- non_anticipating: the output law by exact enumeration, appendix A ----------------------

TARGET = {"A": F(7, 10), "B": F(3, 10)}
DRAFT = {"A": F(5, 10), "B": F(5, 10)}


def next_token_law(length_of):
    """Law of the next token when ``length_of(x_1)`` tokens of a draft from DRAFT are verified.

    At length 0 the target draws; else x_1 is accepted with min(1, p/q), or the
    residual max(p - q, 0) draws. Exact rational arithmetic.
    """
    law = dict.fromkeys(TARGET, F(0))
    left = {x: max(TARGET[x] - DRAFT[x], F(0)) for x in TARGET}
    for x, q in DRAFT.items():
        if length_of(x) == 0:
            for y in TARGET:
                law[y] += q * TARGET[y]
            continue
        keep = min(F(1), TARGET[x] / q)
        law[x] += q * keep
        for y in TARGET:
            law[y] += q * (1 - keep) * left[y] / sum(left.values())
    return law


def survival_given(x):
    """c_1 = 0.8 before any draw; c_2 depends on the drawn x_1: 0.9 after A, 0 after B."""
    return [0.8, 0.8 * (0.9 if x == "A" else 0.0)]


def price(rounds=0):
    return CostModel({0: {1: {w: 1.0 / s for w, s in SPS.items()}}})


def appendix_row():
    return RowView("r", "dspark", 2, 100, 0, False, True)


def test_non_anticipating_counterexample_global_search_is_biased():
    seconds = np.array([1.0 / s for s in SPS.values()])

    def globally(x):
        gains = np.concatenate([[0.0], np.cumsum(survival_given(x))])
        return int(np.argmax((1 + gains) / seconds))

    assert (globally("A"), globally("B")) == (2, 0)
    assert next_token_law(globally) == {"A": F(85, 100), "B": F(15, 100)}


def test_non_anticipating_early_stop():
    law = next_token_law(lambda x: prefix_schedule([survival_given(x)], seconds_of(SPS))[0])
    assert law == TARGET


def test_non_anticipating_policies():
    """The same draw under each lossless policy, after any past: x_1 never moves its own fate."""
    for make in (EarlyStop, Lagged, Auto):
        for past in itertools.product("AB", repeat=2):
            lengths = {}
            for x in "AB":
                policy = make(price())
                for before in past:
                    one_round(policy, before)
                lengths[x] = one_round(policy, x)
            law = next_token_law(lengths.__getitem__)
            assert law == TARGET, (make.__name__, past)


def one_round(policy, x):
    """One round whose draft begins with ``x``; returns min(length, 1), what x_1's fate hangs on."""
    rows = (appendix_row(),)
    plan = policy.plan(rows)
    survival = survival_given(x)
    confidence = [[survival[0], survival[1] / survival[0]][: plan.widths[0]]]
    made = policy.schedule(rows, plan.widths, confidence if plan.needs_confidence else None)
    n = made.lengths[0]
    accepted = min(n, 1)
    policy.observe(
        Outcome(
            rows,
            plan.widths,
            (n,),
            (accepted,),
            (accepted + 1,),
            tuple(map(tuple, confidence)),
            0.01 if plan.needs_confidence else 0.0,
            1.0,
            1.0,
        )
    )
    return n


@given(
    st.lists(st.lists(st.floats(0.0, 1.0), min_size=5, max_size=5), min_size=2, max_size=2),
    st.integers(0, 4),
)
def test_non_anticipating_laws(futures, k):
    """Whether level k + 1 is entered is the same whatever the confidences after it are."""
    head = np.array(futures[0][: k + 1])
    admitted = set()
    for future in futures:
        a = np.cumprod(np.concatenate([head, future[k + 1 :]]))
        rows = [a.tolist(), np.cumprod(futures[1]).tolist()]
        lengths = prefix_schedule(rows, lambda batch, _: float(0.1 + 0.05 * batch**1.5))
        admitted.add(lengths[0] > k)
    assert len(admitted) == 1


@pytest.mark.parametrize("reads", [True, False])
def test_without_a_cost_nothing_is_trimmed(reads):
    """No flat cost is assumed: what was drafted is verified, whatever its confidence."""
    policy = EarlyStop()
    rows = (RowView("r", "dspark", 7, 100, 0, True),)
    assert policy.plan(rows).widths == (0,)  # first the price of a plain step
    made = policy.schedule(rows, (7,), [[0.01] * 7] if reads else None)
    assert made.lengths == (7,)
