"""Systems meet the same prompts in turn, and a reply that is not the reference's own is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from toys import VOCAB, ToyTokenizer

from dspark_mlx.bench import comparison_report as report
from dspark_mlx.bench.comparison import Benchmark, Comparison, encode
from dspark_mlx.bench.lossless import fork_at, near_tie
from dspark_mlx.bench.results import Run
from dspark_mlx.bench.systems import BASELINE, CLOCKS, EngineSystem, MlxLmSystem
from dspark_mlx.bench.workload import BenchPrompt, Variant, Workload
from dspark_mlx.errors import DsparkError, UsageError
from dspark_mlx.events import StepDone
from dspark_mlx.loading import Pair
from dspark_mlx.model.target import Target
from dspark_mlx.schedule import make_policy


def compare(benchmark: Benchmark, prompts: list[BenchPrompt], **options):
    names = {"methods": ["none", "dspark", "lookup"], "schedules": ["fixed:3"], "against": []}
    names = {name: options.pop(name, value) for name, value in names.items()}
    return benchmark.compare(Workload(prompts, **{"tokens": 12, **options}), **names)


def test_every_system_answers_every_prompt_losslessly(benchmark: Benchmark, prompts: list) -> None:
    results = compare(
        benchmark, prompts, repeats=2, concurrency=(1, 3), temperatures=(0.0, 0.7), tokens=7
    )
    assert results.lossless and not results.forks
    systems = {BASELINE, "none", "dspark fixed:3", "lookup fixed:3"}
    names = {(n.system, n.domain, n.temperature, n.concurrency) for n in results.runs}
    assert names == {
        (system, domain, t, c)
        for system in systems
        for domain in ("chat", "code")
        for t in (0.0, 0.7)
        for c in (1, 3)
    }
    for repeats in results.runs.values():
        assert len(repeats) == 2
        assert all(sum(len(run.tokens) for run in groups) == 2 for groups in repeats)
    # Per place and repeat: 4 systems on 4 prompts, but the baseline's own random draws.
    assert results.compared == 2 * 2 * (4 * 4 + 3 * 4)
    found = {cell.name.system: cell for cell in results.cells()}
    assert found["dspark fixed:3"].acceptance[0] > 0.0
    assert found["dspark fixed:3"].scheduled_length <= 3.0
    assert found["none"].scheduled_length == 0.0
    assert "lossless: yes" in report.text(results)


def test_processor_time_can_be_the_clock(benchmark: Benchmark, prompts: list) -> None:
    results = compare(benchmark, prompts[:1], clock="cpu", concurrency=(1, 2))
    assert results.lossless
    assert all(cell.tps > 0 for cell in results.cells())
    assert "processor time" in report.text(results)
    with pytest.raises(UsageError, match="wall's clock"):
        compare(benchmark, prompts, clock="cpu", against=["mlx-lm"])


def test_auto_takes_part_with_a_measured_cost(
    benchmark: Benchmark, prompts: list, monkeypatch
) -> None:
    from dspark_mlx import profiling

    monkeypatch.setattr(profiling, "default_budget", lambda: 0.2)
    results = compare(benchmark, prompts[:1], methods=["dspark"], schedules=["auto"])
    assert results.lossless
    assert benchmark.cost(1).profiled
    assert list(benchmark.options.cache_dir.rglob("profiles/*.json"))


@pytest.mark.parametrize("clock", ["wall", "cpu"])
def test_as_one_reply_ends_the_next_prompt_joins(pair: Pair, prompts: list, clock: str) -> None:
    encoded = [encode(pair, prompts[i % 3]) for i in range(7)]
    system = EngineSystem(pair, Variant("none", "off", "plain"), make_policy("off"), 4)
    theirs = MlxLmSystem(pair.target.model, pair.tokenizer.eos_token_ids, clock=CLOCKS[clock])
    alone = [system.run([one], 9, 0.0, 0).tokens[0] for one in encoded]
    rows: list[int] = []
    step = system.engine.step

    def watched() -> list:
        events = step()
        rows.extend(len(event.rows) for event in events if isinstance(event, StepDone))
        return events

    system.engine.step = watched  # type: ignore[method-assign]
    run = system.run(encoded, 9, 0.0, 0, concurrency=2)
    assert list(run.tokens) == alone
    assert max(rows) == 2 and rows.count(2) > 0.7 * len(rows)
    run = theirs.run(encoded, 9, 0.0, 0, concurrency=2)
    assert [tuple(t) for t in run.tokens] == alone
    assert run.seconds > 0.0


class WrongSystem(EngineSystem):
    """An engine whose third token is not the target's."""

    def run(self, prompts: Sequence[Sequence[int]], *args) -> Run:
        run = super().run(prompts, *args)
        spoiled = tuple((*t[:2], (t[2] + 1) % 90 + 2, *t[3:]) for t in run.tokens)
        return dataclasses.replace(run, tokens=spoiled)


class ShortSystem(EngineSystem):
    """An engine that stops a token early."""

    def run(self, prompts: Sequence[Sequence[int]], *args) -> Run:
        run = super().run(prompts, *args)
        return dataclasses.replace(run, tokens=tuple(t[:-1] for t in run.tokens))


@pytest.mark.parametrize(("kind", "position"), [(WrongSystem, 2), (ShortSystem, 9)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_wrong_engine_is_caught(
    pair: Pair, prompts: list, kind: type, position: int, temperature: float
) -> None:
    system = kind(pair, Variant("none", "off", "wrong"), make_policy("off"), 1)
    comparison = Comparison(
        pair, Workload(prompts[:2], tokens=10, temperatures=(temperature,)), [system]
    )
    results = comparison.run()
    forks = [fork for fork in results.forks if fork.system == "wrong"]
    assert [fork.position for fork in forks] == [position] * 2
    assert not results.lossless
    assert all(fork.margin > 0 for fork in forks)
    assert "lossless: NO, 2 of" in report.text(results)


class FailingPeer:
    name = "peer 1.0 plain"

    def __init__(self, good: int) -> None:
        self.good = good

    def run(self, prompts, max_tokens, temperature, seed, concurrency=0) -> Run:
        if self.good == 0:
            raise DsparkError("peer 1.0: out of memory")
        self.good -= 1
        return Run(((7,) * max_tokens,), 1.0, (0.1,))


def test_a_peer_that_fails_is_named_and_the_rest_goes_on(pair: Pair, prompts: list) -> None:
    results = Comparison(pair, Workload(prompts, tokens=4), [], peers=[FailingPeer(2)]).run()
    assert any("out of memory" in note for note in results.notes)
    assert sum(len(run.tokens) for g in results.runs.values() for run in g[0]) == 4 + 1


def test_ctrl_c_keeps_what_was_measured(pair: Pair, prompts: list) -> None:
    def stop_at(limit: int):
        def progress(done: int, total: int, what: str) -> None:
            if total and done >= limit:
                raise KeyboardInterrupt

        return progress

    results = Comparison(pair, Workload(prompts, tokens=2), [], progress=stop_at(2)).run()
    assert results.stopped and results.compared == 2
    assert "stopped early" in report.text(results)
    with pytest.raises(KeyboardInterrupt):
        Comparison(pair, Workload(prompts, tokens=2), [], progress=stop_at(0)).run()


def test_who_goes_first_rotates(pair: Pair, prompts: list) -> None:
    order: list[str] = []
    system = EngineSystem(pair, Variant("none", "off", "none"), make_policy("off"), 1)

    def progress(done: int, total: int, what: str) -> None:
        order.append(what.split(",")[0])

    Comparison(pair, Workload(prompts, tokens=2), [system], progress=progress).run()
    assert order[2:-1] == [BASELINE, "none", "none", BASELINE] * 2


def test_a_fork_is_where_texts_part_and_a_final_end_is_no_fork() -> None:
    assert fork_at([1, 2, 3], [1, 2, 3], (9,)) is None
    assert fork_at([1, 2], [1, 2, 9], (9,)) is None
    assert fork_at([1, 5, 3], [1, 2, 3], (9,)) == 1
    assert fork_at([1, 2], [1, 2, 3], (9,)) == 2
    assert fork_at([], [], ()) is None


def test_what_counts_as_a_tie_depends_on_the_precision() -> None:
    assert near_tie(1e-4, 20.0, mx.float32, False)
    assert not near_tie(0.1, 20.0, mx.float32, False)
    assert near_tie(0.1, 20.0, mx.bfloat16, False)
    assert near_tie(0.1, 20.0, mx.float32, True)
    assert not near_tie(2.0, 20.0, mx.bfloat16, True)


def test_mlx_lm_alone_and_batched_write_the_same(pair: Pair) -> None:
    system = MlxLmSystem(pair.target.model, (1,))
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12]]
    alone = [system.run([p], 6, 0.0, 0).tokens[0] for p in prompts]
    together = system.run(prompts, 6, 0.0, 0)
    assert [len(t) for t in together.tokens] == [len(t) for t in alone]
    assert together.seconds > 0 and len(together.first_token_seconds) == 2


def test_methods_that_cannot_be_had_are_refused(pair: Pair, benchmark: Benchmark, prompts) -> None:
    benchmark.pair = dataclasses.replace(pair, drafter=None, method="lookup", reason="none known")
    assert benchmark.methods(None) == ["none", "lookup"]
    with pytest.raises(UsageError, match="needs a drafter"):
        compare(benchmark, prompts, methods=["dspark"])


def test_a_prompt_beyond_the_context_is_refused_before_anything_runs(pair: Pair) -> None:
    target = type(pair.target)(pair.target.model, {"max_position_embeddings": 20})
    small = dataclasses.replace(pair, target=target)
    long = BenchPrompt("chat", ({"role": "user", "content": "x" * 50},))
    with pytest.raises(UsageError, match="longer than the context"):
        Comparison(small, Workload([long], tokens=2), [])


def wide_llama():
    """A toy whose heads are as wide as a group of quantised keys."""
    args = llama.ModelArgs(
        model_type="llama", hidden_size=32, num_hidden_layers=2, intermediate_size=64,
        num_attention_heads=2, num_key_value_heads=1, rms_norm_eps=1e-5, vocab_size=VOCAB,
        head_dim=64,
    )  # fmt: skip
    mx.random.seed(3)
    model = llama.Model(args)
    mx.eval(model.parameters())
    return model


def test_a_quantised_kv_cache_is_compared_with_mlx_lms_own(prompts: list) -> None:
    target = Target(wide_llama(), kv_bits=8)
    target.check()
    pair = Pair(target, ToyTokenizer(), None, "lookup", "no drafter", 4)
    system = EngineSystem(pair, Variant("lookup", "fixed", "lookup"), make_policy("fixed"), 2)
    results = Comparison(pair, Workload(prompts[:2], tokens=8, concurrency=(1, 2)), [system]).run()
    assert results.lossless
    assert any("does not quantise" in note for note in results.notes)
