"""``dspark train``: answers of a target in, a drafter folder out."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..errors import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    from ..training.options import SCHEDULES, TrainOptions

    d = TrainOptions()
    parser.epilog = (
        "Run the same command again to resume. DIR then holds the best drafter so far (use it with "
        "--drafter DIR), checkpoints/, log.jsonl and training.svg. Several machines: start it with "
        "mlx.launch; the data must be on each."
    )
    add = parser.add_argument
    add("--model", required=True, metavar="M", help="the target: a known name, Hub id or folder")
    add(
        "--data",
        required=True,
        nargs="+",
        type=Path,
        metavar="FILE",
        help="jsonl: the target's answers to prompts",
    )
    add("--out", required=True, type=Path, metavar="DIR", help="where the drafter goes")
    add(
        "--exclude",
        nargs="*",
        type=Path,
        default=[],
        metavar="FILE",
        help="jsonl of prompts that must never be trained on",
    )
    shape = parser.add_argument_group("drafter")
    add = shape.add_argument
    add("--layers", type=int, default=d.layers, help="draft layers (default %(default)s)")
    add(
        "--taps",
        type=_numbers,
        default=None,
        metavar="I,J,..",
        help="target layers to read, -1 the embedding (default: 3, spread)",
    )
    add("--block", type=int, default=d.block, help="tokens a block drafts (default %(default)s)")
    add(
        "--head",
        choices=("vanilla", "gated", "rnn"),
        default=d.head,
        help="sequential head (default %(default)s)",
    )
    add("--rank", type=int, default=d.rank, help="its rank, 0 for none (default %(default)s)")
    add(
        "--draft-vocab",
        type=int,
        default=d.draft_vocab,
        metavar="N",
        help="ids in the hot vocabulary, 0 for all (default %(default)s)",
    )
    add(
        "--init",
        choices=("target", "random"),
        default=d.init,
        help="first weights (default: the target's last layers)",
    )
    learn = parser.add_argument_group("learning")
    add = learn.add_argument
    add("--steps", type=int, default=d.steps, help="optimiser steps (default %(default)s)")
    add(
        "--batch-tokens",
        type=int,
        default=d.batch_tokens,
        metavar="N",
        help="tokens in a micro-batch: what memory grows with (default %(default)s)",
    )
    add(
        "--accumulate",
        type=int,
        default=d.accumulate,
        metavar="N",
        help="micro-batches a step and process (default %(default)s)",
    )
    add(
        "--anchor-spacing",
        type=float,
        default=d.anchor_spacing,
        metavar="X",
        help="one anchor in X answer tokens (default %(default)s)",
    )
    add(
        "--anchors",
        type=int,
        default=d.anchors,
        metavar="N",
        help="most anchors a sequence (default %(default)s)",
    )
    add(
        "--max-length",
        type=int,
        default=d.max_length,
        metavar="N",
        help="tokens of a sequence, the rest is cut (default %(default)s)",
    )
    add("--lr", type=float, default=d.lr, help="learning rate (default %(default)s)")
    add("--warmup", type=int, default=d.warmup, metavar="N", help="steps (default %(default)s)")
    add("--schedule", choices=SCHEDULES, default=d.schedule, help="(default %(default)s)")
    add(
        "--final-lr",
        type=float,
        default=d.final_lr,
        metavar="X",
        help="last learning rate as a share of --lr (default %(default)s)",
    )
    add("--clip", type=float, default=d.clip, help="gradient norm (default %(default)s)")
    add("--weight-decay", type=float, default=d.weight_decay, help="(default %(default)s)")
    add("--seed", type=int, default=d.seed, help="(default %(default)s)")
    run = parser.add_argument_group("run")
    add = run.add_argument
    add(
        "--held-out",
        type=float,
        default=d.held_out,
        metavar="X",
        help="share of prompts kept for validation (default %(default)s)",
    )
    add(
        "--validate-every",
        type=int,
        default=d.validate_every,
        metavar="N",
        help="steps (default %(default)s)",
    )
    add(
        "--validate-samples",
        type=int,
        default=d.validate_samples,
        metavar="N",
        help="held-out answers looked at (default %(default)s)",
    )
    add(
        "--checkpoint-every",
        type=int,
        default=d.checkpoint_every,
        metavar="N",
        help="steps (default %(default)s)",
    )
    add(
        "--patience",
        type=int,
        default=d.patience,
        metavar="N",
        help="stop after N validations without a new best (default: never)",
    )
    add(
        "--feature-cache",
        type=float,
        default=0.0,
        metavar="GB",
        help="keep up to GB of the target's hidden states in DIR: faster from the second pass on "
        "(default: none)",
    )
    add(
        "--save-dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of the drafter's weights (default %(default)s)",
    )
    add("--cache-dir", type=Path, metavar="DIR", help="where models are kept")
    add(
        "--log-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="print a line at most every S seconds (default %(default)s)",
    )


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like 1,14,27") from None


def run(args: argparse.Namespace) -> int:
    import mlx.core as mx

    from ..training.options import TrainOptions
    from ..training.session import train

    options = TrainOptions(
        layers=args.layers,
        taps=args.taps,
        block=args.block,
        head=args.head,
        rank=args.rank,
        draft_vocab=args.draft_vocab or None,
        init=args.init,
        steps=args.steps,
        batch_tokens=args.batch_tokens,
        accumulate=args.accumulate,
        anchor_spacing=args.anchor_spacing,
        anchors=args.anchors,
        max_length=args.max_length,
        lr=args.lr,
        warmup=args.warmup,
        schedule=args.schedule,
        final_lr=args.final_lr,
        clip=args.clip,
        weight_decay=args.weight_decay,
        held_out=args.held_out,
        validate_every=args.validate_every,
        validate_samples=args.validate_samples,
        checkpoint_every=args.checkpoint_every,
        patience=args.patience,
        seed=args.seed,
    )
    model, tokenizer, config = load_target(args.model, args.cache_dir)
    state = train(
        model,
        tokenizer,
        config,
        args.data,
        args.out,
        options,
        exclude=args.exclude,
        cache_bytes=int(args.feature_cache * 1e9),
        save_dtype=getattr(mx, args.save_dtype),
        say=lambda text: print(text, file=sys.stderr, flush=True),
        log_seconds=args.log_seconds,
    )
    return 0 if state.step >= options.steps or options.patience else 130


def load_target(name: str, cache_dir: Path | None) -> tuple[Any, Any, dict[str, Any]]:
    """mlx-lm's model, tokenizer and config; float32 on the CPU, where that is fastest."""
    import mlx.core as mx
    from mlx_lm import load

    from .. import sources
    from ..registry import Registry
    from ..target import to_float
    from .progress import ProgressLine

    entry = Registry.load().resolve(name)
    with ProgressLine() as report:
        folder = sources.fetch(entry.target_source, cache_dir=cache_dir, report=report)
    try:
        model, tokenizer, config = load(str(folder), return_config=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot load {name}: {error}") from None
    if mx.default_device().type == mx.DeviceType.cpu:
        to_float(model, mx.float32)
    return model, tokenizer, config
