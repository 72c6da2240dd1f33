"""``dspark train``: prompts in, the target's own answers to them, a drafter folder out."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .progress import ProgressLine
from .rounds import temperatures

if TYPE_CHECKING:
    from ..loading import Pair
    from ..training.data import Record

EXIT_INTERRUPTED = 130


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
        help="target layers to read, -1 the embedding (default: 3, spread)",
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


def run(args: argparse.Namespace) -> int:
    import mlx.core as mx

    from ..training.data import read_records
    from ..training.options import LossWeights, TrainOptions
    from ..training.session import train

    options = TrainOptions(
        **shape_of(args),
        init=args.init,
        steps=args.steps,
        batch_tokens=args.batch_tokens,
        accumulate=args.accumulate,
        anchor_spacing=args.anchor_spacing,
        anchors=args.anchors,
        max_length=args.max_length,
        optimizer=args.optimizer,
        muon_lr=args.muon_lr,
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
        loss=LossWeights(*args.loss_weights),
    )
    # Before anything is downloaded or loaded: bad data must be said at once.
    records = {path: read_records([path]) for path in args.data}
    read_records(args.exclude)
    pair = load_pair(args)
    files = with_answers(args, pair, records)
    if files is None:
        return 0
    state = train(
        pair.target.model,
        pair.tokenizer,
        pair.target.config,
        files,
        args.out,
        options,
        exclude=args.exclude,
        cache_bytes=int(args.feature_cache * 1e9),
        save_dtype=getattr(mx, args.save_dtype),
        say=say,
        log_seconds=args.log_seconds,
    )
    return 0 if state.step >= options.steps or options.patience else EXIT_INTERRUPTED


def shape_of(args: argparse.Namespace) -> dict[str, Any]:
    """The drafter's shape as asked for; with ``--start-from`` it is what that one has."""
    from ..drafter.config import DrafterConfig
    from ..training.options import TrainOptions

    base = TrainOptions()
    if args.start_from is not None:
        folder = args.start_from.expanduser().resolve()
        base = TrainOptions(start_from=str(folder)).shaped_like(DrafterConfig.from_folder(folder))
    shape: dict[str, Any] = {"start_from": base.start_from}
    for name in ("layers", "taps", "block", "head", "rank", "draft_vocab"):
        asked, has = getattr(args, name), getattr(base, name)
        if name == "draft_vocab" and asked == 0:
            asked, unset = None, False
        else:
            unset = asked is None
        if base.start_from and not unset and asked != has:
            flag = "--" + name.replace("_", "-")
            raise UsageError(
                f"{flag} {asked} does not fit the drafter to start from, which has {has}",
                f"leave {flag} out, or train a new drafter without --start-from",
            )
        shape[name] = has if unset else asked
    return shape


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def load_pair(args: argparse.Namespace) -> Pair:
    """The target without a drafter."""
    from .. import loading
    from ..registry import Registry

    options = loading.LoadOptions(
        args.model,
        drafter="none",
        method="none",
        max_rows=args.answer_rows,
        cache_dir=args.cache_dir,
    )
    with ProgressLine() as report:
        return loading.load_pair(Registry.load().resolve(args.model), options, report)


def with_answers(
    args: argparse.Namespace, pair: Pair, records: dict[Path, list[Record]]
) -> list[Path] | None:
    """The files to train on. Prompts without an answer are answered first, into the out folder.

    None when that was all that was asked for.
    """
    import mlx.core as mx

    from ..loading import LoadOptions, new_engine
    from ..training.data import answer_in_messages
    from .rollout import answer

    open_ = [r for rs in records.values() for r in rs if not answer_in_messages(r).answered]
    whole = [p for p, rs in records.items() if any(answer_in_messages(r).answered for r in rs)]
    answers = args.out / "answers.jsonl"
    if open_:
        if mx.distributed.init().size() > 1:
            raise UsageError(
                "prompts are answered by one process",
                "run with --answers-only first, then train on its answers.jsonl",
            )
        options = LoadOptions(args.model, method="none", max_rows=args.answer_rows)
        made = answer(
            new_engine(pair, options),
            open_,
            answers,
            temperatures=args.answer_temps,
            max_tokens=args.answer_tokens,
            seed=args.seed,
            say=say,
        )
        say(f"{answers}: {made:,} tokens added")
        mx.clear_cache()
    return None if args.answers_only else [*whole, *([answers] if open_ else [])]
