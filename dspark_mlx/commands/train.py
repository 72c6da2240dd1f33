"""``dspark train``: prompts in, the target's own answers to them, a drafter folder out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..training.train_options import SHAPE, LossWeights, TrainOptions
from .options import (
    add_cache_flag,
    add_field_flags,
    count,
    given_fields,
    numbers,
    positive,
    temperatures,
)
from .output import say
from .progress import ProgressLine

if TYPE_CHECKING:
    from ..loading import Pair
    from ..training.data import Record

EXIT_INTERRUPTED = 130
GROUPS = {"drafter": "drafter", "learning": "learning", "run": "run"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Run the same command again to resume. DIR then holds the best drafter so far (use it with "
        "--drafter DIR), checkpoints/, log.jsonl and training.svg. To train on several machines, "
        "start the command with mlx.launch; each machine needs the data."
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
    add("--out", required=True, type=Path, metavar="DIR", help="folder for the drafter")
    add(
        "--exclude",
        nargs="*",
        type=Path,
        default=[],
        metavar="FILE",
        help="jsonl of prompts that are never trained on",
    )
    answers = parser.add_argument_group(
        "answers", "The target answers prompts that have no answer yet, into DIR/answers.jsonl."
    )
    for flag, default, help_ in (
        ("--answer-tokens", 512, "longest answer in tokens"),
        ("--answer-rows", 16, "answers made together"),
    ):
        help_ += " (default: %(default)s)"
        answers.add_argument(flag, type=positive, default=default, metavar="N", help=help_)
    answers.add_argument(
        "--answer-temps",
        type=temperatures,
        default=(0.0, 0.0, 0.7, 1.0),
        metavar="T,T",
        help="temperatures, taken in turn by the prompts (default: 0,0,0.7,1)",
    )
    answers.add_argument("--answers-only", action="store_true", help="make the answers and stop")
    parsers = {
        "start_from": lambda text: str(Path(text).expanduser().resolve()),
        "taps": numbers(int, "1,14,27"),
        "draft_vocab": lambda text: count(text) or None,  # 0 stands for all ids
        "loss": _weights,
    }
    add_field_flags(parser, TrainOptions, GROUPS, parsers)
    run = parser.add_argument_group("storage and output")
    run.add_argument(
        "--feature-cache",
        type=float,
        default=0.0,
        metavar="GB",
        help="keep up to GB of the target's hidden states in DIR: faster from the second pass on "
        "(default: none)",
    )
    run.add_argument(
        "--save-dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="type of the drafter's weights (default: %(default)s)",
    )
    add_cache_flag(run)
    run.add_argument(
        "--log-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="print a line at most every S seconds (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    options = train_options(args)
    for name in ("feature_cache", "log_seconds"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} must be a finite number, 0 or more")
    import mlx.core as mx

    from ..training.checkpoint import check_out
    from ..training.data import read_records
    from ..training.run import train_drafter

    # Bad data is reported before anything is downloaded or loaded.
    check_out(args.out)
    records = {path: read_records([path]) for path in args.data}
    read_records(args.exclude)
    pair = load_target_alone(args)
    files = answered_files(args, pair, records)
    if files is None:
        return 0
    state = train_drafter(
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


def train_options(args: argparse.Namespace) -> TrainOptions:
    """The options that the flags ask for. With ``--start-from`` the shape is that drafter's.

    Raises UsageError for a flag that asks for another shape than the drafter to start from has.
    """
    given = given_fields(args, TrainOptions)
    options = TrainOptions(**given)
    if options.start_from is None:
        return options
    from ..draft.dspark.config import DrafterConfig

    options = options.shaped_like(DrafterConfig.from_folder(Path(options.start_from)))
    for name in SHAPE:
        has = getattr(options, name)
        if name in given and given[name] != has:
            flag = "--" + name.replace("_", "-")
            raise UsageError(
                f"{flag} {given[name] or 0} does not fit the drafter to start from, which has "
                f"{has or 0}",
                f"leave {flag} out, or train a new drafter without --start-from",
            )
    return options


def load_target_alone(args: argparse.Namespace) -> Pair:
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
    with ProgressLine() as line:
        return loading.load_pair(Registry.load().resolve(args.model), options, line)


def answered_files(
    args: argparse.Namespace, pair: Pair, records: dict[Path, list[Record]]
) -> list[Path] | None:
    """The files to train on, after the target has answered the prompts that have no answer.

    None with ``--answers-only``.
    """
    import mlx.core as mx

    from ..loading import LoadOptions, engine_options, make_engine
    from ..schedule import Off
    from ..training.data import answer_in_messages
    from ..training.rollout import answer

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
            seed=getattr(args, "seed", 0),
            say=say,
        )
        say(f"{answers}: {made:,} tokens added")
        mx.clear_cache()
    return None if args.answers_only else [*whole, *([answers] if open_ else [])]


def _weights(text: str) -> Any:
    values = numbers(float, "0.1,0.9,1")(text)
    if len(values) != 3 or min(values) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not three weights like 0.1,0.9,1")
    return LossWeights(*values)
