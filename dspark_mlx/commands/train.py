"""``dspark train``: prompts in, the target's own answers to them, a drafter folder out."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .progress import ProgressLine
from .train_flags import configure

if TYPE_CHECKING:
    from ..loading import Pair
    from ..training.data import Record

__all__ = ["configure", "run"]

EXIT_INTERRUPTED = 130


def run(args: argparse.Namespace) -> int:
    import mlx.core as mx

    from ..training.data import read_records
    from ..training.options import LossWeights, TrainOptions
    from ..training.run_state import check_out
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
    for name in ("feature_cache", "log_seconds"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} must be finite, 0 or more")
    check_out(args.out)
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
    early = 0 < options.patience <= state.since_best
    return 0 if early or state.step >= options.steps else EXIT_INTERRUPTED


def shape_of(args: argparse.Namespace) -> dict[str, Any]:
    """The drafter's shape as asked for; with ``--start-from`` it is what that one has."""
    from ..draft.dspark.config import DrafterConfig
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

    from ..loading import LoadOptions, engine_options, make_engine
    from ..schedule import Off
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
            make_engine(pair, Off(), **engine_options(pair, options)),
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
