"""The default model itself: what speculation writes is what mlx-lm's plain decoding writes."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from dspark_mlx.engine.engine import Engine
from dspark_mlx.engine.text import encode_chat
from dspark_mlx.events import Finished, Prefill, StepDone
from dspark_mlx.loading import LoadOptions, load_engine
from dspark_mlx.request import Cuts, Request, SamplingParams

# One process loads the model once.
pytestmark = [pytest.mark.real_model, pytest.mark.xdist_group("model")]

MODEL = "smollm2-135m"
TOKENS, TEN = 16, 10


def prompts(count: int) -> list[str]:
    """The first turns of the packaged prompts, the domains in turn."""
    text = resources.files("dspark_mlx").joinpath("data/prompts.jsonl").read_text("utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    by_domain: dict[str, list[str]] = {}
    for row in rows:
        by_domain.setdefault(row["domain"], []).append(row["turns"][0])
    turns = zip(*by_domain.values(), strict=True)
    return [prompt for group in turns for prompt in group][:count]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine(LoadOptions(MODEL, schedule="fixed", profile=False))[0]


def run(engine: Engine, request: Request) -> tuple[list[int], list[Any]]:
    engine.submit(request)
    tokens: list[int] = []
    seen: list[Any] = []
    while engine.active:
        for event in engine.step():
            seen.append(event)
            if isinstance(event, StepDone):
                tokens += [t.id for row in event.rows for t in row.tokens]
    return tokens, seen


def chat(prompt: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": prompt},)


def margin(model: Any, tokens: list[int]) -> float:
    """Top-1 less top-2 logit after ``tokens``."""
    top = mx.sort(model(mx.array([tokens]))[0, -1])[-2:]
    return float((top[1] - top[0]).item())


def test_lossless_greedy_on_twenty_prompts(engine: Engine) -> None:
    model, tokenizer = engine.target.model, engine.tokenizer
    methods = [*engine.batch.proposers, "auto"]
    accepted = 0
    for i, prompt in enumerate(prompts(20)):
        ids = encode_chat(tokenizer, chat(prompt))
        plain = [int(token) for token, _ in generate_step(mx.array(ids), model, max_tokens=TEN)]
        request = Request(
            f"p{i}",
            messages=chat(prompt),
            max_tokens=TEN,
            method=methods[i % len(methods)],
            ignore_eos=True,
        )
        tokens, seen = run(engine, request)
        forks = [k for k, (a, b) in enumerate(zip(tokens, plain, strict=True)) if a != b]
        assert not forks, (
            f"{prompt!r} forks at token {forks[0]}, "
            f"top-2 margin {margin(model, ids + plain[: forks[0]]):.2g}"
        )
        accepted += seen[-1].accepted
    assert accepted > 0, "nothing was ever accepted: speculation is not at work"


def test_every_decode_length_writes_the_same(engine: Engine) -> None:
    prompt = prompts(4)[3]
    block = max(p.spec.block for p in engine.batch.proposers.values())
    texts = {
        tuple(
            run(
                engine,
                Request(
                    f"n{n}", messages=chat(prompt), max_tokens=TOKENS, cuts=Cuts(draft_length=n)
                ),
            )[0]
        )
        for n in range(block + 1)
    }
    assert len(texts) == 1


def test_a_seed_writes_the_same_with_and_without_speculation(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=7)
    texts = [
        run(
            engine,
            Request(m, messages=chat("Tell a joke."), max_tokens=16, method=m, sampling=sampling),
        )[0]
        for m in ("auto", "lookup", "none")
    ]
    assert texts[0] == texts[1] == texts[2]


def test_the_second_turn_prefills_only_what_is_new(engine: Engine) -> None:
    first = chat("Name two colours.")
    tokens, _ = run(engine, Request("t1", messages=first, max_tokens=12))
    answer = engine.tokenizer.decode([t for t in tokens if t not in engine.tokenizer.eos_token_ids])
    second = (
        *first,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "Now one more."},
    )
    warm, seen = run(engine, Request("t2", messages=second, max_tokens=12))
    reused = next(e.reused for e in seen if isinstance(e, Prefill))
    ended = next(e for e in seen if isinstance(e, Finished))
    assert reused == ended.reused_tokens
    assert reused > ended.prompt_tokens // 2
    engine.prefiller.prefixes.clear()
    cold, _ = run(engine, Request("t3", messages=second, max_tokens=12))
    assert warm == cold
