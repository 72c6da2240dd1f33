"""The flags of ``dspark train``, grouped as a reader looks for them."""

from __future__ import annotations

import argparse
from pathlib import Path

from .numbers import temperatures


def configure(parser: argparse.ArgumentParser) -> None:
    from ..training.options import INITS, OPTIMIZERS, SCHEDULES, TrainOptions

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
        help="jsonl of prompts, or of prompts with the target's answers",
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
    answers = parser.add_argument_group(
        "answers", "Prompts without an answer are answered by the target, into DIR/answers.jsonl."
    )
    add = answers.add_argument
    add(
        "--answer-tokens",
        type=int,
        default=512,
        metavar="N",
        help="most tokens an answer (default %(default)s)",
    )
    add(
        "--answer-temps",
        type=temperatures,
        default=(0.0, 0.0, 0.7, 1.0),
        metavar="T,T",
        help="temperatures, prompts take them in turn (default 0,0,0.7,1)",
    )
    add(
        "--answer-rows",
        type=int,
        default=16,
        metavar="N",
        help="answers made together (default %(default)s)",
    )
    add("--answers-only", action="store_true", help="make the answers and stop")
    shape = parser.add_argument_group("drafter")
    add = shape.add_argument
    add(
        "--start-from",
        type=Path,
        metavar="DRAFTER",
        help="go on from a trained drafter: its folder; the shape is then its own",
    )
    add("--layers", type=int, help=f"draft layers (default {d.layers})")
    add(
        "--taps",
        type=_numbers,
        default=None,
        metavar="I,J,..",
        help="target layers to read, -1 the embedding, as in --taps=-1,9 (default: 3, spread)",
    )
    add("--block", type=int, help=f"tokens a block drafts (default {d.block})")
    add(
        "--head",
        choices=("vanilla", "gated", "rnn"),
        help=f"sequential head (default {d.head})",
    )
    add("--rank", type=int, help=f"its rank, 0 for none (default {d.rank})")
    add(
        "--draft-vocab",
        type=int,
        metavar="N",
        help=f"ids in the hot vocabulary, 0 for all (default {d.draft_vocab})",
    )
    add(
        "--init",
        choices=INITS,
        default=d.init,
        help="first weights: attention to the last positions, the target's last layers, or "
        "random (default %(default)s)",
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
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        default=d.optimizer,
        help="muon: for the backbone's matrices, AdamW for the rest (default %(default)s)",
    )
    add(
        "--muon-lr",
        type=float,
        default=d.muon_lr,
        metavar="X",
        help="learning rate of the matrices under muon (default %(default)s)",
    )
    add("--lr", type=float, default=d.lr, help="learning rate of AdamW (default %(default)s)")
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
    add(
        "--loss-weights",
        type=_weights,
        default=(0.1, 0.9, 1.0),
        metavar="CE,L1,CONF",
        help="of cross-entropy, total variation and confidence (default: the paper's 0.1,0.9,1)",
    )
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


def _weights(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) != 3 or min(values) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not three weights like 0.1,0.9,1")
    return values
