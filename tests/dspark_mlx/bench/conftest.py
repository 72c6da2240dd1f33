"""A toy pair whose drafter knows some of the target's text, for benchmarks in milliseconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from decoding import plain_text, toy_drafter, toy_target
from toys import ToyTokenizer

from dspark_mlx.bench.comparison import Benchmark
from dspark_mlx.bench.workload import BenchPrompt
from dspark_mlx.draft.strategies import dspark_drafter
from dspark_mlx.loading import LoadOptions, Pair
from dspark_mlx.registry import Registry

TEXTS = ("hello", "the sea", "a + b", "again")


@pytest.fixture
def prompts() -> list[BenchPrompt]:
    return [
        BenchPrompt("chat" if i < 2 else "code", ({"role": "user", "content": text},))
        for i, text in enumerate(TEXTS)
    ]


@pytest.fixture(scope="session")
def pair() -> Pair:
    target, tokenizer = toy_target(), ToyTokenizer()
    lessons = [
        plain_text(
            "llama", tuple(tokenizer.apply_chat_template([{"role": "user", "content": t}])), 40
        )
        for t in TEXTS
    ]
    drafter = dspark_drafter(toy_drafter(target, lessons=lessons), target)
    return Pair(target, tokenizer, drafter, "dspark", "a toy", 6)


@pytest.fixture
def benchmark(pair: Pair, tmp_path: Path) -> Benchmark:
    registry = Registry.load()
    options = LoadOptions("smollm2-135m", cache_dir=tmp_path)
    return Benchmark(pair, registry.resolve("smollm2-135m"), options)
