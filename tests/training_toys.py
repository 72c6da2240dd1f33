"""A target whose next token depends on the last one only, and answers of its own to train on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from toys import EOS, VOCAB, ToyTokenizer, llama_toy, prompt

from dspark_mlx.training.train_options import TrainOptions


def chain_model(seed: int = 3) -> nn.Module:
    """A Llama toy that does not attend: a Markov chain, so that a drafter can learn all of it."""
    model = llama_toy(seed)
    for layer in model.layers:
        layer.self_attn.o_proj.weight = mx.zeros_like(layer.self_attn.o_proj.weight)
    return model


def model_config(model: nn.Module) -> dict[str, Any]:
    return dataclasses.asdict(model.args)


def answers(model: nn.Module, count: int, length: int = 24) -> list[dict[str, Any]]:
    """Records with the target's greedy answers to random prompts."""
    tokenizer = ToyTokenizer()
    prompts = [tokenizer.decode(prompt(5, seed=i)) for i in range(count)]
    rows = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in prompts]
    tokens = np.array(rows)
    for _ in range(length):
        best = mx.argmax(model(mx.array(tokens))[:, -1, 2:], axis=-1) + 2
        tokens = np.concatenate([tokens, np.array(best)[:, None]], axis=1)
    return [
        {
            "prompt": text,
            "response": "",
            "response_tokens": [int(t) for t in row[len(rows[0]) :]] + [EOS],
            "temperature": 0.0,
            "domain": ("math", "code")[i % 2],
        }
        for i, (text, row) in enumerate(zip(prompts, tokens, strict=True))
    ]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def toy_options(**changes: Any) -> TrainOptions:
    values: dict[str, Any] = {
        "layers": 1,
        "tap_count": 1,
        "block": 4,
        "rank": 16,
        "draft_vocab": 80,
        "steps": 60,
        "batch_tokens": 512,
        "anchor_spacing": 2.0,
        "lr": 5e-3,
        "warmup": 5,
        "held_out": 0.2,
        "validate_every": 30,
        "validate_samples": 16,
        "checkpoint_every": 10,
    }
    return TrainOptions(**(values | changes))


assert VOCAB > 80
