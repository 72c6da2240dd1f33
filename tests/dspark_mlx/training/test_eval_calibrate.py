"""Evaluation and calibration play real rounds through the engine, here of toys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from toys import ToyTokenizer
from training_toys import answers, chain_model, model_config, toy_options, write_jsonl

from dspark_mlx.commands import calibrate as calibrate_command
from dspark_mlx.commands import eval as eval_command
from dspark_mlx.draft.dspark.calibration import read_calibration
from dspark_mlx.draft.dspark.load_drafter import load_drafter
from dspark_mlx.draft.dspark.proposer import DSparkProposer
from dspark_mlx.engine.engine import Engine
from dspark_mlx.errors import UsageError
from dspark_mlx.model.target import Target
from dspark_mlx.schedule import Fixed
from dspark_mlx.training.rounds import (
    HeldOutPrompt,
    PlayedRound,
    accepted_length,
    play,
    read_prompts,
)
from dspark_mlx.training.run import train_drafter


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model, out = chain_model(), tmp_path_factory.mktemp("run")
    data = write_jsonl(out / "d.jsonl", answers(model, 60))
    train_drafter(
        model, ToyTokenizer(), model_config(model), [data], out, toy_options(),
        say=lambda text: None,
    )  # fmt: skip
    return model, out


def toy_engine(trained: tuple[Any, Path]) -> Engine:
    model, out = trained
    target = Target(model, model_config(model))
    drafter = load_drafter(out, target)
    return Engine(
        target,
        ToyTokenizer(),
        [DSparkProposer(drafter, target.vocab_size)],
        Fixed(None),
        default_method="dspark",
    )


PROMPTS = [
    HeldOutPrompt(({"role": "user", "content": f"q{i}xyz"},), ("math", "code")[i % 2])
    for i in range(6)
]


def test_a_trained_toy_is_accepted_in_real_rounds(trained: tuple[Any, Path]) -> None:
    heard: list[tuple[int, int, float]] = []
    rounds = play(
        toy_engine(trained), PROMPTS, (0.0,), 30, on_reply=lambda *args: heard.append(args)
    )
    assert accepted_length(rounds) > 3
    assert sum(r.committed for r in rounds) >= 6 * 29
    assert [done for done, _, _ in heard] == [1, 2, 3, 4, 5, 6]
    assert all(len(r.confidence) == r.drafted and r.accepted <= r.drafted for r in rounds)


def test_the_summary_covers_domains_temperatures_and_positions(trained: tuple[Any, Path]) -> None:
    rounds = play(toy_engine(trained), PROMPTS, (0.0, 1.0), 20)
    result = eval_command.summary(rounds, 4)
    cells = {(c["domain"], c["temperature"]) for c in result["domains"]}
    assert cells == {(d, t) for d in ("math", "code", "all") for t in (0.0, 1.0)}
    shares = result["domains"][0]["survival"]
    assert len(shares) == 4
    assert [p["position"] for p in result["positions"]] == [1, 2, 3, 4]
    shown = eval_command.table(result | {"calibrated": False})
    assert "accepted" in shown and "not calibrated" in shown
    json.dumps(result, allow_nan=False)


def overconfident(count: int, seed: int) -> list[PlayedRound]:
    """Blocks whose confidences are pushed twice too far from one half."""
    rng = np.random.default_rng(seed)
    rounds = []
    for _ in range(count):
        odds = rng.normal(0.5, 1.0, 3)
        stood = rng.random(3) < 1 / (1 + np.exp(-odds))
        told = 1 / (1 + np.exp(-2 * odds))
        accepted = int(np.logical_and.accumulate(stood).sum())
        values = tuple(map(float, told))
        survival = tuple(map(float, np.cumprod(told)))
        rounds.append(PlayedRound("math", 0.0, values, survival, 3, accepted, accepted + 1))
    return rounds


def test_calibration_lowers_the_error_on_rounds_it_did_not_see(tmp_path: Path) -> None:
    fitted, tested = overconfident(3000, 1), overconfident(3000, 2)
    result = calibrate_command.calibrate(fitted, tested, 3)
    assert set(result) == {"greedy"}, "no sampled reply was played"
    for row in result["greedy"]["positions"]:
        assert row["ece_after"] < 0.03 < row["ece_before"]
    first = result["greedy"]["positions"][0]
    assert first["auc_after"] == first["auc_before"], "the order of confidences stays"
    calibrate_command.write(tmp_path, result, tested)
    kept = json.loads((tmp_path / "calibration.json").read_text())
    assert len(kept["greedy"]["temperatures"]) == len(kept["greedy"]["offsets"]) == 3
    assert (tmp_path / "reliability.svg").read_text().startswith("<svg")
    assert "temperature" in calibrate_command.table(result)


def test_how_decided_the_drafter_was_is_weighed_where_it_tells_more(tmp_path: Path) -> None:
    def decided(count: int, seed: int, worth: float) -> list[PlayedRound]:
        rng = np.random.default_rng(seed)
        out = []
        for _ in range(count):
            odds, peaks = rng.normal(0.0, 1.0, (2, 3))
            stood = rng.random(3) < 1 / (1 + np.exp(-0.4 * odds - worth * peaks))
            told = 1 / (1 + np.exp(-odds))
            accepted = int(np.logical_and.accumulate(stood).sum())
            survival = tuple(map(float, np.cumprod(told)))
            values, seen = tuple(map(float, told)), tuple(map(float, peaks))
            out.append(PlayedRound("chat", 0.0, values, survival, 3, accepted, accepted + 1, seen))
        return out

    tested = decided(4000, 2, 1.2)
    result = calibrate_command.calibrate(decided(4000, 1, 1.2), tested, 3)
    part = result["greedy"]
    assert part["peaks"][0] == pytest.approx(1.2, abs=0.3) and part["temperatures"][0] > 1.5
    first = part["positions"][0]
    assert first["auc_after"] > first["auc_before"] + 0.1
    assert all(row["ece_after"] < 0.04 for row in part["positions"])
    calibrate_command.write(tmp_path, result, tested)
    kept = read_calibration(tmp_path, 3)
    assert kept is not None and kept.greedy.peaks == tuple(part["peaks"])
    # As the engine applies it.
    logits = mx.array([[0.3, -1.0, 2.0]])
    peaks = mx.array([[-0.5, 1.5, 0.0]])
    for k, value in enumerate(mx.sigmoid(kept.apply(logits, [True], peaks))[0].tolist()):
        x = logits[0, k].item() / part["temperatures"][k] + part["offsets"][k]
        x += part["peaks"][k] * peaks[0, k].item()
        assert value == pytest.approx(1 / (1 + np.exp(-x)), abs=1e-5)
    nothing = calibrate_command.calibrate(decided(4000, 3, 0.0), decided(4000, 4, 0.0), 3)
    assert max(nothing["greedy"]["peaks"]) < 0.1


def test_greedy_and_sampled_replies_are_calibrated_apart() -> None:
    """One kind has its tokens accepted more often than told, the other less."""

    def shifted(by: float, temperature: float, seed: int) -> list[PlayedRound]:
        rng = np.random.default_rng(seed)
        out = []
        for _ in range(3000):
            odds = rng.normal(0.0, 1.0)
            told = float(1 / (1 + np.exp(-odds)))
            stood = int(rng.random() < 1 / (1 + np.exp(-odds - by)))
            out.append(PlayedRound("chat", temperature, (told,), (told,), 1, stood, stood + 1))
        return out

    fitted = shifted(0.8, 0.0, 1) + shifted(-0.8, 0.7, 2)
    tested = shifted(0.8, 0.0, 3) + shifted(-0.8, 0.7, 4)
    result = calibrate_command.calibrate(fitted, tested, 1)
    for name, by in (("greedy", 0.8), ("sampled", -0.8)):
        assert result[name]["offsets"][0] == pytest.approx(by, abs=0.25)
        assert result[name]["positions"][0]["ece_after"] < 0.03
        assert result[name]["positions"][0]["ece_before"] > 0.1
    alone = calibrate_command.calibrate(fitted, tested, 1, offsets=False)
    assert alone["greedy"]["offsets"] == [0.0]
    assert alone["greedy"]["positions"][0]["ece_after"] > 0.05, "no temperature moves one half"


def test_a_fit_that_does_not_hold_on_the_other_half_is_not_kept() -> None:
    fitted = overconfident(400, 1)
    honest = [
        PlayedRound(
            "math", 0.0, (0.5,) * 3, (0.5, 0.25, 0.125), 3, int(accepted), int(accepted) + 1
        )
        for accepted in np.cumprod(np.random.default_rng(3).random((3000, 3)) < 0.5, 1).sum(1)
    ]
    part = calibrate_command.calibrate(fitted, honest, 3)["greedy"]
    assert part["as_drafted"] and part["temperatures"] == [1.0] * 3 and part["offsets"] == [0.0] * 3
    for row in part["positions"]:
        assert row["ece_after"] == row["ece_before"]
    assert "kept as drafted" in calibrate_command.table({"greedy": part})
    assert not calibrate_command.calibrate(fitted, fitted, 3)["greedy"]["as_drafted"]


def test_what_is_kept_is_fitted_on_both_halves_and_judged_on_one() -> None:
    fitted, tested = overconfident(400, 1), overconfident(2000, 2)
    part = calibrate_command.calibrate(fitted, tested, 3)["greedy"]
    both = calibrate_command.calibrate([*fitted, *tested], tested, 3)["greedy"]
    assert part["rounds"] == 2400 and part["held_out_rounds"] == 2000
    assert part["temperatures"] == both["held_out_scale"]["temperatures"]
    assert part["held_out_scale"]["temperatures"] != part["temperatures"]
    alone = calibrate_command.measure(tested, 0, part["held_out_scale"])
    assert part["positions"][0] == alone, "never judged by a fit that saw the rounds"


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(UsageError, match="only 20 rounds"):
        calibrate_command.calibrate(overconfident(20, 1), overconfident(20, 2), 3)
    for few in (0, 1, 99):
        with pytest.raises(UsageError, match=f"^{few} greedy rounds are too few to judge"):
            calibrate_command.calibrate(overconfident(600, 1), overconfident(few, 2), 3)


def test_a_stored_calibration_is_loaded_with_the_drafter(trained: tuple[Any, Path]) -> None:
    model, out = trained
    rounds = [
        PlayedRound(
            r.domain, r.temperature, (*r.confidence, 0.5), (*r.survival, 0.2), 4, r.accepted, 1
        )
        for r in overconfident(400, 3)
    ]
    calibrate_command.write(out, calibrate_command.calibrate(rounds, rounds, 4), rounds)
    try:
        drafter = load_drafter(out, Target(model, model_config(model)))
        assert drafter.calibration is not None
        assert len(drafter.calibration.greedy.temperatures) == 4
        assert drafter.calibration.sampled == drafter.calibration.greedy, "all there is"
    finally:
        (out / "calibration.json").unlink()


def test_prompts_are_taken_from_every_domain_and_end_with_a_question(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "p.jsonl",
        [{"domain": "math", "turns": [f"m{i}", "answer", "again"]} for i in range(5)]
        + [{"domain": "code", "prompt": "c"}],
    )
    prompts = read_prompts([path], 2)
    assert [p.domain for p in prompts] == ["math", "code", "math"]
    assert all(len(p.messages) == 1 for p in prompts)
