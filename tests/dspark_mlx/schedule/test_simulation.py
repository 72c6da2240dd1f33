"""Whole runs: auto against every fixed length in hindsight, under load, and without a profile."""

import numpy as np
import pytest

from dspark_mlx.bench.simulator.reply_trace import DOMAINS, ReplyTrace, from_trace, synthetic
from dspark_mlx.bench.simulator.simulate import fixed_length, in_hindsight, simulate
from dspark_mlx.bench.simulator.tables import tables
from dspark_mlx.errors import UsageError
from dspark_mlx.events import Load, Memory, RowStep, StepDone, Token
from dspark_mlx.request import Cuts
from dspark_mlx.schedule import Auto, CostModel, EarlyStop, Fixed, Lagged, make_policy

TEXTS = ("chat", "code", "math", "mixed")
BLOCK = 7


def scripts(domain, concurrency, tokens=200):
    return [synthetic(domain, tokens, BLOCK, 100 + i) for i in range(max(7, 4 * concurrency))]


@pytest.fixture(scope="module")
def cells():
    """(table, domain, concurrency) -> auto and every fixed length over the same replies."""
    done = {}
    for table in tables():
        for domain in TEXTS:
            for concurrency in range(1, 9):
                text, world = scripts(domain, concurrency), tables()[table]
                fixed = in_hindsight(text, world, concurrency, drain=False)
                auto = simulate(
                    Auto(tables()[table]), text, world, concurrency=concurrency, drain=False
                )
                done[table, domain, concurrency] = auto.tps, {n: r.tps for n, r in fixed.items()}
    return done


@pytest.mark.slow
@pytest.mark.xdist_group("grid")
def test_auto_is_near_the_best_fixed_length_of_every_cell(cells):
    short = {
        cell: auto / max(fixed.values())
        for cell, (auto, fixed) in cells.items()
        if auto < 0.97 * max(fixed.values())
    }
    assert not short


@pytest.mark.slow
@pytest.mark.xdist_group("grid")
def test_auto_beats_every_single_fixed_length_over_all_cells(cells):
    def overall(choose):
        return np.mean([np.log(choose(auto, fixed) / fixed[0]) for auto, fixed in cells.values()])

    auto = overall(lambda auto, _: auto)
    for length in range(BLOCK + 1):
        assert auto > overall(lambda _, fixed, n=length: fixed[n])


@pytest.mark.slow
@pytest.mark.xdist_group("grid")
def test_auto_is_never_meaningfully_slower_than_plain_decoding(cells):
    assert not {c: auto / fixed[0] for c, (auto, fixed) in cells.items() if auto < 0.98 * fixed[0]}


@pytest.mark.parametrize("table", ["linear", "m4-pro-quantised", "cliff-after-4", "cpu-2-cores"])
@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_a_drafter_that_does_not_suit_costs_little(table, concurrency):
    text, world = scripts("weak", concurrency), tables()[table]
    plain = fixed_length(0, text, world, concurrency)
    auto = simulate(Auto(tables()[table]), text, world, concurrency=concurrency)
    assert auto.tps >= 0.98 * plain.tps


@pytest.mark.parametrize("table", ["m4-pro-quantised", "cpu-2-cores", "cliff-after-4"])
def test_auto_holds_for_rows_that_must_not_anticipate(table):
    for domain in TEXTS:
        text, world = scripts(domain, 2, tokens=400), tables()[table]
        best = max(r.tps for r in in_hindsight(text, world, 2).values())
        auto = simulate(Auto(tables()[table]), text, world, concurrency=2, schedule_invariant=False)
        assert auto.tps >= 0.97 * best
        assert "optimum" not in auto.rules


LOADS = {
    "all steps": lambda widest: 2.0,
    "wide steps": lambda widest: 1.2 + 0.3 * widest,
    "wide steps, much": lambda widest: 1.5 + 2.0 * widest,
}
ON, OFF, END = 100, 180, 240  # rounds
SETTLED = 15


def steady(seed, tokens=2200):
    """A reply whose difficulty does not wander, so that only load can move the length."""
    rng = np.random.default_rng(seed)
    chance = np.clip(rng.beta(6, 1, (tokens, 1)) - 0.02 * np.arange(BLOCK), 0.02, 0.98)
    accepted = rng.random(chance.shape) < chance
    return ReplyTrace("steady", chance, tuple(np.cumprod(accepted, axis=1).sum(axis=1).tolist()))


def lengths_under_load(table, concurrency, load):
    """Mean lengths before, during and after the load, each once ``SETTLED`` rounds are over."""
    widths = []
    for seed in range(2):
        run = simulate(
            Auto(tables()[table]),
            [steady(10 * seed + i) for i in range(concurrency)],
            tables()[table],
            concurrency=concurrency,
            slowdown=lambda i, widest: LOADS[load](widest) if ON <= i < OFF else 1.0,
            jitter=0.03,
            seed=seed,
        )
        widths.append(run.widths[:END])
    widths = np.array(widths, float)
    phases = (SETTLED, ON), (ON + SETTLED, OFF), (OFF + SETTLED, END)
    return [float(widths[:, start:stop].mean()) for start, stop in phases]


@pytest.mark.slow
@pytest.mark.parametrize("table", sorted(tables()))
@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("load", sorted(LOADS))
def test_load_on_and_off_moves_the_length_within_15_rounds(table, concurrency, load):
    """The right way when it comes, and back to what it was when it has gone."""
    before, during, after = lengths_under_load(table, concurrency, load)
    assert after == pytest.approx(before, abs=1.0)
    if load == "all steps":  # the same length pays
        assert during == pytest.approx(before, abs=1.0)
    elif before < 0.5:  # nothing paid before; nothing must under load
        assert during < 0.5
    else:  # one drift for all widths does not tell them apart: shorter, or plain, or as before
        assert during < before + 0.1
    if load == "wide steps, much" and before > 0.5:
        assert during < before - 0.4


def test_predictions_follow_the_load():
    text = [synthetic("code", 1500, BLOCK, i) for i in range(3)]
    run = simulate(
        Auto(tables()["cpu-2-cores"]), text, tables()["cpu-2-cores"],
        slowdown=lambda i, _: 2.0 if 60 <= i < 120 else 1.0, jitter=0.03,
    )  # fmt: skip
    ratio = np.array(run.measured) / np.array([p or np.nan for p in run.predicted])
    for settled in (slice(30, 60), slice(75, 120), slice(135, 180)):
        assert np.nanmedian(ratio[settled]) == pytest.approx(1.0, abs=0.1)


def test_auto_without_a_profile_learns_the_cost_and_is_no_slower_than_plain():
    for table in ("cpu-2-cores", "linear", "m4-pro-quantised"):
        text, world = scripts("code", 1, tokens=400), tables()[table]
        fixed = in_hindsight(text, world)
        auto = simulate(Auto(), text, world)
        assert auto.tps >= 0.95 * max(r.tps for r in fixed.values()), table
        assert auto.tps >= 0.97 * fixed[0].tps, table


def test_auto_without_a_profile_trims_nothing_before_it_has_measured():
    text = [synthetic("chat", 300, BLOCK, 0)]
    policy = Auto()
    run = simulate(policy, text, tables()["cpu-2-cores"])
    measuring = run.rules.count("measure")
    assert run.widths[:measuring] == [0] * 3 + [2] * 3 + [4] * 3 + [7] * 3
    assert "measure" not in run.rules[measuring:]


@pytest.mark.parametrize("name", ["auto", "early-stop", "lagged"])
def test_every_policy_obeys_static_cuts(name):
    text = scripts("code", 2)
    policy = make_policy(name, cost=tables()["flat"], draft_length=3)
    assert max(simulate(policy, text, tables()["flat"], concurrency=2).widths) == 3
    own = simulate(
        make_policy(name, cost=tables()["flat"]), text, tables()["flat"],
        concurrency=2, cuts=Cuts(p_min=0.7),
    )  # fmt: skip
    free = simulate(make_policy(name, cost=tables()["flat"]), text, tables()["flat"], concurrency=2)
    assert own.accepted / own.scheduled > free.accepted / free.scheduled


@pytest.mark.parametrize("length", [0, 1, 4, 7])
def test_the_fast_run_of_a_fixed_length_is_the_same_run(length):
    text, world = scripts("mixed", 3, tokens=60), tables()["m4-pro-quantised"]
    slow = simulate(Fixed(length), text, world, concurrency=3)
    fast = fixed_length(length, text, world, concurrency=3)
    assert fast.seconds == pytest.approx(slow.seconds)
    for name in ("tokens", "drafted", "scheduled", "accepted", "widths"):
        assert getattr(fast, name) == getattr(slow, name)


@pytest.mark.parametrize("policy", [Auto, EarlyStop, Lagged])
def test_a_run_ends_where_its_replies_do(policy):
    text = [synthetic("chat", n, BLOCK, n) for n in (1, 2, 7, 40)]
    run = simulate(policy(tables()["cpu-2-cores"]), text, tables()["cpu-2-cores"], concurrency=3)
    assert run.tokens == 50


def test_the_domains_accept_as_the_paper_reports():
    for domain, share in {"chat": 0.457, "code": 0.676, "math": 0.769}.items():
        text = [synthetic(domain, 1500, 7, i) for i in range(6)]
        run = simulate(Fixed(7), text, tables()["flat"])
        assert run.accepted / run.scheduled == pytest.approx(share, abs=0.06)
    assert set(DOMAINS) >= set(TEXTS) - {"mixed"}
    with pytest.raises(UsageError, match="no domain"):
        synthetic("poetry", 10, 7, 0)


# -- replay of a recorded trace --------------------------------------------------------------


def recorded(position, confidence, scheduled, accepted):
    n = len(confidence)
    row = RowStep(
        "r", position, "dspark", tuple(range(n)), ("x",) * n, tuple(confidence), (), scheduled,
        accepted, tuple(Token(0, "x", "draft") for _ in range(accepted + 1)),
    )  # fmt: skip
    return StepDone(
        0, 0.0, (row,), "fixed", 0.1, 0.0, 0.1, 0.0, None, None, 10.0, 1, Load(), Memory()
    )


def test_a_trace_replays_as_it_happened():
    lines = [
        recorded(10, [0.9, 0.8, 0.7], 3, 2),
        recorded(13, [0.5, 0.4, 0.3], 3, 0),
        recorded(14, [0.9, 0.9, 0.9], 3, 3),
    ]
    (script,) = from_trace(lines)
    assert script.accepts == (2, 2, 2, 0, 3, 3, 3, 3)
    assert script.confidence[0].tolist() == [0.9, 0.8, 0.7]
    run = simulate(Fixed(3), [script], tables()["flat"])
    assert (run.tokens, len(run.widths)) == (8, 3)
    assert run.accepted == 5


def test_a_trace_without_drafts_is_refused():
    with pytest.raises(UsageError, match="no round"):
        from_trace([recorded(0, [], 0, 0)])


@pytest.mark.parametrize(
    ("position", "confidence"), [(0, float("nan")), (0, 1.5), (0, -0.5), (9 * 10**11, 0.5)]
)
def test_a_round_that_cannot_have_been_is_refused(position, confidence):
    with pytest.raises(UsageError, match=r"no chance|at position"):
        from_trace([recorded(position, [confidence], 1, 1)])


def test_a_policy_may_be_wrong_about_the_world_and_recovers():
    """Told that wide steps are nearly free where they are dear, it finds out."""
    text, world = scripts("chat", 1, tokens=500), tables()["linear"]
    wrong = CostModel({0: {1: {1: 0.025, 8: 0.026}}}, overhead=0.0005)
    plain = in_hindsight(text, world)[0]
    assert simulate(Auto(wrong), text, world).tps >= 0.85 * plain.tps


@pytest.mark.parametrize("concurrency", [1, 2, 4])
def test_replies_that_draft_well_are_tried_whatever_those_before_them_lost(concurrency):
    world = tables()["m4-pro-quantised"]
    hard = [ReplyTrace("hard", np.full((300, 7), 0.3), (0,) * 300)] * concurrency
    easy = [ReplyTrace("easy", np.full((100, 7), 0.5), (2,) * 100)] * concurrency
    run = simulate(Auto(world), hard + easy, world, concurrency=concurrency)
    drafts = [width > 0 for width in run.widths[300:]]
    assert any(drafts[:5]) and sum(drafts) >= 0.8 * len(drafts)
