"""Whole runs on a toy: it learns, resumes to the same weights, and fails in clear words."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from toys import ToyTokenizer
from training_toys import answers, chain_model, model_config, toy_options, write_jsonl

from dspark_mlx.commands import train as command
from dspark_mlx.draft.dspark.load_drafter import load_drafter
from dspark_mlx.errors import ModelError, UsageError
from dspark_mlx.model.target import Target
from dspark_mlx.training import checkpoint
from dspark_mlx.training.checkpoint import (
    RunState,
    TrainingError,
    list_checkpoints,
    load_checkpoint,
    model_fingerprint,
)
from dspark_mlx.training.run import train_drafter
from dspark_mlx.training.run_log import read_log
from dspark_mlx.training.step import StepComputer
from dspark_mlx.training.train_options import LossWeights, TrainOptions


@pytest.fixture(scope="module")
def model() -> Any:
    return chain_model()


@pytest.fixture(scope="module")
def corpus(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "d.jsonl", answers(model, 60))


def run(
    model: Any, corpus: Path, out: Path, options: TrainOptions | None = None, **more: Any
) -> tuple[RunState, list[str]]:
    said: list[str] = []
    state = train_drafter(
        model,
        ToyTokenizer(),
        model_config(model),
        [corpus],
        out,
        options or toy_options(),
        say=said.append,
        log_seconds=0.0,
        **more,
    )
    return state, said


def final_weights(out: Path) -> dict[str, mx.array]:
    _, tensors, _ = load_checkpoint(list_checkpoints(out / "checkpoints")[-1])
    return tensors


def test_a_toy_drafter_learns_its_target(model: Any, corpus: Path, tmp_path: Path) -> None:
    state, said = run(model, corpus, tmp_path, toy_options(steps=150))
    rows = read_log(tmp_path / "log.jsonl")
    accepted = [row["accepted"] for row in rows if row["kind"] == "step"]
    assert accepted[0] < 1.5
    assert state.best > 3.5, "of at most 5: four drafted tokens and the target's own"
    assert any("held out: accepted" in line for line in said)
    assert "tok/s" in "".join(said) and "left" in "".join(said)
    picture = (tmp_path / "training.svg").read_text()
    assert picture.startswith("<svg") and "Accepted length" in picture


def test_a_run_can_begin_with_a_trained_drafter(
    model: Any, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, _ = run(model, corpus, tmp_path / "first", toy_options(steps=60))
    first = load_drafter(tmp_path / "first", Target(model, model_config(model)))
    start = TrainOptions(start_from=str(tmp_path / "first")).shaped_like(first.config)
    kept = {f.name: getattr(start, f.name) for f in dataclasses.fields(start)}
    shape = {k: kept[k] for k in ("layers", "taps", "block", "head", "rank", "draft_vocab")}
    options = toy_options(**shape, start_from=start.start_from, steps=2, lr=1e-6, muon_lr=1e-6)
    begun, said = run(model, corpus, tmp_path / "second", options)
    assert any("starting from the drafter" in line for line in said)
    assert begun.best == pytest.approx(state.best, abs=0.1), "it goes on where the first ended"
    second = load_drafter(tmp_path / "second", Target(model, model_config(model)))
    assert second.config == first.config
    assert np.array_equal(second.draft_to_target, first.draft_to_target)
    with pytest.raises(UsageError, match="another shape"):
        wrong = dataclasses.replace(options, block=3)
        run(model, corpus, tmp_path / "third", wrong)
    with pytest.raises(UsageError, match="another shape"):
        run(model, corpus, tmp_path / "third", toy_options(start_from=start.start_from))


def test_the_command_takes_the_shape_of_the_drafter_it_starts_from(
    model: Any, corpus: Path, tmp_path: Path
) -> None:
    run(model, corpus, tmp_path, toy_options(steps=1, validate_every=1))
    parser = argparse.ArgumentParser()
    command.configure(parser)
    base = ["--model", "m", "--data", "d", "--out", "o", "--start-from", str(tmp_path)]
    shape = command.train_options(parser.parse_args(base))
    assert (shape.layers, shape.block, shape.rank, shape.draft_vocab) == (1, 4, 16, 80)
    assert command.train_options(parser.parse_args([*base, "--block", "4"])) == shape
    for flag, value in (("--block", "5"), ("--draft-vocab", "0"), ("--head", "rnn")):
        with pytest.raises(UsageError, match=flag):
            command.train_options(parser.parse_args([*base, flag, value]))
    with pytest.raises(ModelError, match="no drafter folder"):
        command.train_options(parser.parse_args([*base[:-1], str(tmp_path / "absent")]))


def test_every_option_with_a_help_text_has_a_flag() -> None:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    base = ["--model", "m", "--data", "d", "--out", "o"]
    assert command.train_options(parser.parse_args(base)) == TrainOptions()
    flags = "--taps=-1,9 --draft-vocab 0 --loss-weights 1,0.5,0 --lr 1e-4 --init random"
    options = command.train_options(parser.parse_args([*base, *flags.split()]))
    loss = LossWeights(1.0, 0.5, 0.0)
    assert options == TrainOptions(
        taps=(-1, 9), draft_vocab=None, loss=loss, lr=1e-4, init="random"
    )


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_every_head_trains_and_loads(model: Any, corpus: Path, tmp_path: Path, head: str) -> None:
    options = toy_options(head=head, steps=30, validate_every=30)
    run(model, corpus, tmp_path, options)
    drafter = load_drafter(tmp_path, Target(model, model_config(model)))
    assert drafter.config.markov_head_type == head
    rows = [r for r in read_log(tmp_path / "log.jsonl") if r["kind"] == "step"]
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_the_result_is_a_deepspec_checkpoint_with_a_reduced_vocabulary(
    model: Any, corpus: Path, tmp_path: Path
) -> None:
    run(model, corpus, tmp_path, toy_options(steps=2, validate_every=2))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert config["draft_vocab_size"] == 80
    weights = mx.load(str(tmp_path / "model.safetensors"))
    assert {"d2t", "t2d", "fc.weight", "markov_head.markov_w1.weight"} <= set(weights)
    assert weights["fc.weight"].dtype == mx.bfloat16
    drafter = load_drafter(tmp_path, Target(model, model_config(model)))
    assert int(drafter.draft_to_target.max()) < 96


@pytest.mark.parametrize("cache", [0, 1 << 20])
def test_a_killed_run_resumes_to_the_weights_of_an_unbroken_one(
    model: Any, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: int
) -> None:
    options = toy_options(steps=25, checkpoint_every=10, validate_every=10)
    run(model, corpus, tmp_path / "whole", options, cache_bytes=cache)

    calls = 0
    gradient = StepComputer.gradient

    def dying(self: StepComputer, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 17:
            raise MemoryError("killed")
        return gradient(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(StepComputer, "gradient", dying)
        with pytest.raises(MemoryError):
            run(model, corpus, tmp_path / "broken", options, cache_bytes=cache)
    state, said = run(model, corpus, tmp_path / "broken", options, cache_bytes=cache)
    assert any("resuming at step 10" in line for line in said)
    assert state.step == 25
    whole, broken = final_weights(tmp_path / "whole"), final_weights(tmp_path / "broken")
    assert whole.keys() == broken.keys() and len(whole) > 20
    tolerance = 2e-3 if cache else 0.0  # a cache keeps float16
    for name in whole:
        gap = mx.abs(whole[name].astype(mx.float32) - broken[name].astype(mx.float32)).max()
        assert gap.item() <= tolerance, name


def test_accumulated_micro_batches_are_one_batch(model: Any, corpus: Path, tmp_path: Path) -> None:
    """Two micro-batches of a step have the gradient of their common mean."""
    out = []
    for accumulate, steps in ((2, 3), (1, 6)):
        options = toy_options(accumulate=accumulate, steps=steps, validate_every=100)
        state, _ = run(model, corpus, tmp_path / f"{accumulate}", options)
        out.append(state)
    assert out[0].tokens == out[1].tokens and out[0].slots == out[1].slots


def test_a_loss_that_is_no_number_stops_the_run_and_leaves_checkpoints_whole(
    model: Any, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(model, corpus, tmp_path, toy_options(steps=10))
    before = {p: p.read_bytes() for p in list_checkpoints(tmp_path / "checkpoints")}
    gradient = StepComputer.gradient

    def poisoned(self: StepComputer, *args: Any) -> Any:
        losses, tree = gradient(self, *args)
        return dataclasses.replace(losses, total=mx.array(float("nan"))), tree

    monkeypatch.setattr(StepComputer, "gradient", poisoned)
    with pytest.raises(TrainingError, match="loss at step 11 is nan"):
        run(model, corpus, tmp_path, toy_options(steps=20))
    assert before and {p: p.read_bytes() for p in before} == before


def test_a_full_disk_is_said_and_leaves_checkpoints_whole(
    model: Any, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(model, corpus, tmp_path, toy_options(steps=10))
    before = {p: p.read_bytes() for p in list_checkpoints(tmp_path / "checkpoints")}

    def full(path: str, tensors: Any, metadata: Any = None) -> None:
        Path(path).write_bytes(b"cut")

    monkeypatch.setattr(checkpoint.mx, "save_safetensors", full)
    with pytest.raises(ModelError, match="cannot save a checkpoint"):
        run(model, corpus, tmp_path, toy_options(steps=20))
    assert before and {p: p.read_bytes() for p in before} == before
    assert not list((tmp_path / "checkpoints").glob(".saving*"))


def test_another_shape_cannot_continue_a_run(model: Any, corpus: Path, tmp_path: Path) -> None:
    run(model, corpus, tmp_path, toy_options(steps=2))
    with pytest.raises(UsageError, match="rank 16, not 8"):
        run(model, corpus, tmp_path, toy_options(steps=4, rank=8))


def test_more_data_continues_with_a_new_pass(model: Any, corpus: Path, tmp_path: Path) -> None:
    run(model, corpus, tmp_path / "o", toy_options(steps=3))
    more = write_jsonl(tmp_path / "more.jsonl", answers(model, 80))
    state, said = run(model, more, tmp_path / "o", toy_options(steps=5))
    assert any("the data has changed" in line for line in said)
    assert (state.step, state.epoch) == (5, 1)


def test_early_stop_ends_a_run_that_no_longer_improves(
    model: Any, corpus: Path, tmp_path: Path
) -> None:
    options = toy_options(steps=200, lr=1e-9, validate_every=5, patience=2)
    state, said = run(model, corpus, tmp_path, options)
    assert state.step <= 20 and any("stopping early" in line for line in said)


def test_ctrl_c_saves_and_ends_after_the_step(
    model: Any, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    gradient = StepComputer.gradient
    calls = 0

    def interrupted(self: StepComputer, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            signal.raise_signal(signal.SIGINT)
        return gradient(self, *args)

    monkeypatch.setattr(StepComputer, "gradient", interrupted)
    state, _ = run(model, corpus, tmp_path, toy_options(steps=50))
    assert state.step == 3
    assert [p.name for p in list_checkpoints(tmp_path / "checkpoints")] == [
        "step-0000003.safetensors"
    ]


def test_taps_are_spread_and_the_targets_own_weights_are_not_trained(model: Any) -> None:
    from dspark_mlx.training.new_drafter import build_drafter, new_config, spread_taps

    target = Target(model, model_config(model))
    shape = new_config(target, toy_options(taps=(1,)), mask_token_id=0)
    drafter = build_drafter(shape, target, None, seed=0)
    trained = dict(tree_flatten(drafter.trainable_parameters()))
    assert not any(name.startswith(("embed_tokens", "lm_head")) for name in trained)
    assert spread_taps(30, 3) == (1, 14, 27)
    with pytest.raises(UsageError):
        spread_taps(2, 3)


def test_batches_hold_every_sample_once_within_the_limit() -> None:
    from dspark_mlx.training.blocks import plan_batches
    from dspark_mlx.training.data import TrainingSample

    rng = np.random.default_rng(0)
    samples = [TrainingSample(np.zeros(n, np.int32), 1, "k") for n in rng.integers(5, 60, 300)]
    batches = plan_batches(samples, 128, np.random.default_rng(1))
    assert sorted(i for b in batches for i in b) == list(range(300))
    assert all(len(b) * max(len(samples[i]) for i in b) <= 128 for b in batches)


def test_the_first_table_says_what_follows_what() -> None:
    from dspark_mlx.training.data import TrainingSample
    from dspark_mlx.training.initial_weights import bigram_factors

    rng = np.random.default_rng(0)
    follow = rng.permutation(20) + 4  # token t is followed by follow[t - 4], nine times in ten
    samples = []
    for _ in range(40):
        text = [4]
        for _ in range(60):
            sure = rng.random() < 0.9
            text.append(int(follow[text[-1] - 4]) if sure else int(rng.integers(4, 24)))
        samples.append(TrainingSample(np.array(text, np.int32), 1, "k"))
    ids = np.arange(4, 24)
    w1, w2 = bigram_factors(samples, 30, ids, 20)
    assert w1.shape == (30, 20) and w2.shape == (20, 20)
    said = ids[(w1 @ w2.T).argmax(-1)]
    assert np.array_equal(said[4:24], follow)
    assert np.isfinite(w1).all() and np.isfinite(w2).all()
    unseen = w1[0]  # shares the row of tokens in general
    assert np.array_equal(unseen, w1[29])


def test_a_full_or_partial_feature_cache_gives_the_same_features(
    model: Any, corpus: Path, tmp_path: Path
) -> None:
    from dspark_mlx.training.data import encode_all, read_records
    from dspark_mlx.training.features import FeatureCache, FeatureSource, Teacher

    target = Target(model, model_config(model))
    samples = encode_all(read_records([corpus]), ToyTokenizer(), 100, 96)[:6]
    teacher = Teacher(target, None)
    plain = FeatureSource(target, [0], teacher).batch(samples)
    size = len(samples[0]) * FeatureCache(tmp_path / "x", [0], 32, 0).row_bytes

    for limit in (10 * size, 3 * size):
        root = tmp_path / str(limit)
        cache = FeatureCache(root, [0], 32, limit)
        source = FeatureSource(target, [0], teacher, cache)
        source.batch(samples[:2])
        cache.save()
        again = FeatureSource(target, [0], teacher, FeatureCache(root, [0], 32, limit, 1))
        assert samples[0] in again.cache and samples[5] not in again.cache
        for found in (source.batch(samples), again.batch(samples)):
            assert mx.allclose(found.taps, plain.taps, atol=2e-2).item()
            assert mx.allclose(found.final, plain.final, atol=2e-2).item()
            assert mx.allclose(found.log_norm, plain.log_norm, atol=1e-3).item()
        assert cache.used <= limit


def test_muon_takes_the_matrices_and_adamw_the_rest(model: Any) -> None:
    from dspark_mlx.training.step import is_matrix

    two, one = mx.zeros((2, 2)), mx.zeros((2,))
    assert is_matrix("layers.0.mlp.up_proj.weight", two) and is_matrix("fc.weight", two)
    assert not is_matrix("layers.0.input_layernorm.weight", one)
    assert not is_matrix("markov_head.markov_w1.weight", two)
    assert not is_matrix("confidence_head.proj.weight", two)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_both_optimizers_resume_exactly(
    model: Any, corpus: Path, tmp_path: Path, optimizer: str
) -> None:
    options = toy_options(optimizer=optimizer, steps=6, checkpoint_every=3, validate_every=10)
    run(model, corpus, tmp_path / "whole", options)
    weights = final_weights(tmp_path / "whole")
    last = list_checkpoints(tmp_path / "whole" / "checkpoints")
    last[-1].unlink()
    run(model, corpus, tmp_path / "whole", options)
    again = final_weights(tmp_path / "whole")
    assert all(mx.array_equal(weights[k], again[k]).item() for k in weights)


def test_attention_begins_at_the_previous_positions() -> None:
    from toys import llama_toy, prompt

    from dspark_mlx.training.new_drafter import build_drafter, new_config

    model = llama_toy(1)
    target = Target(model, model_config(model))
    shape = new_config(target, toy_options(taps=(0, 1), block=3, rank=4), mask_token_id=0)
    sample = mx.array([prompt(60, seed=i) for i in range(8)])
    drafter = build_drafter(shape, target, None, seed=0, text=sample)
    _, features, _ = target.forward_training(sample[:1], [0, 1])
    attention = drafter.layers[0].self_attn
    anchor = 40
    keys, _ = attention.keys_values(drafter.project(features[:, :anchor]), 0)
    block = drafter._block_input(sample[:1, anchor : anchor + 1], 3)[:, 0]
    queries = attention.queries(drafter.layers[0].input_layernorm(block), anchor)
    scores = np.array((queries[0, :2] * attention.scale) @ keys[0, 0].T)  # heads of the first keys
    # The first slot of head 0 looks one back, of head 1 two back.
    assert scores[0, 0].argmax() == anchor - 1
    assert scores[1, 0].argmax() == anchor - 2
    # Later slots are further away: the nearest they can see.
    assert all(scores[h, 2].argmax() >= anchor - 2 for h in (0, 1))


def test_a_step_that_ruins_the_weights_is_neither_saved_nor_exported(
    model: Any, corpus: Path, tmp_path: Path
) -> None:
    run(model, corpus, tmp_path, toy_options(steps=10))
    kept = [*list_checkpoints(tmp_path / "checkpoints"), tmp_path / "model.safetensors"]
    before = {p: p.read_bytes() for p in kept}
    ruin: dict[str, Any] = {"lr": 1e38, "muon_lr": 1e38, "checkpoint_every": 1}
    for more in ({}, {"validate_every": 1}):
        with pytest.raises(TrainingError, match=r"lower --lr .* step-0000010, is from before it"):
            run(model, corpus, tmp_path, toy_options(steps=20, **ruin, **more))
        assert {p: p.read_bytes() for p in kept} == before
    state, _ = run(model, corpus, tmp_path, toy_options(steps=12))
    assert state.step == 12, "and the advice works"
    for held_out in (0.0, 0.1):
        fresh = tmp_path / f"fresh-{held_out}"
        with pytest.raises(TrainingError, match="begin again with a lower --lr"):
            run(model, corpus, fresh, toy_options(steps=1, held_out=held_out, **ruin))
        assert not (fresh / "model.safetensors").exists()


def test_a_run_of_another_model_is_not_continued(model: Any, corpus: Path, tmp_path: Path) -> None:
    run(model, corpus, tmp_path, toy_options(steps=2))
    other = chain_model()
    other.update(tree_map(lambda v: v * 1.01, other.parameters()))
    with pytest.raises(UsageError, match="of another model"):
        run(other, corpus, tmp_path, toy_options(steps=4))
    assert model_fingerprint(chain_model()) == model_fingerprint(model)


def test_a_folder_with_a_model_in_it_is_left_alone(
    model: Any, corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="holds a model already"):
        run(model, corpus, tmp_path, toy_options(steps=2))
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_a_run_stopped_before_its_first_validation_leaves_a_drafter(
    model: Any, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    gradient = StepComputer.gradient

    def interrupted(self: StepComputer, *args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return gradient(self, *args)

    monkeypatch.setattr(StepComputer, "gradient", interrupted)
    _, said = run(model, corpus, tmp_path, toy_options(steps=50, patience=2))
    assert load_drafter(tmp_path, Target(model, model_config(model))).block_size == 4
    assert "not yet validated" in said[-1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_length": -5},
        {"weight_decay": math.nan},
        {"final_lr": math.inf},
        {"final_lr": -3.0},
        {"anchor_spacing": 0.5},
        {"anchor_spacing": 1e300},
        {"seed": -1},
        {"seed": 10**23},
        {"loss": LossWeights(0.0, 0.0, 0.0)},
        {"loss": LossWeights(math.nan)},
        {"loss": LossWeights(math.inf)},
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        TrainOptions(**wrong)
