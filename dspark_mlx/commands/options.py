"""Flags that several commands share, and what they mean as options of the library."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..registry import DEFAULT_MODEL
from ..request import DRAFT_SAMPLINGS, METHOD_ALIASES, METHODS, Cuts, SamplingParams

if TYPE_CHECKING:
    from ..loading import LoadOptions

# -- values --------------------------------------------------------------------------------------


def count(text: str) -> int:
    """A whole number, 0 or more."""
    return _whole(text, 0)


def positive(text: str) -> int:
    """A whole number, 1 or more."""
    return _whole(text, 1)


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, {least} or more")
    return value


def temperatures(text: str) -> tuple[float, ...]:
    """A list like ``0,0.7``."""
    values = numbers(float, "0,0.7")(text)
    if not all(0 <= value < 100 for value in values):
        raise argparse.ArgumentTypeError("temperatures are from 0 to 100")
    return values


def numbers(kind: type[Any], example: str) -> Callable[[str], tuple[Any, ...]]:
    """A parser of comma-separated numbers; ``example`` shows in its error."""

    def parse(text: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list like {example}") from None

    return parse


# -- flags ---------------------------------------------------------------------------------------


def add_field_flags(
    parser: argparse.ArgumentParser,
    options: type[Any],
    groups: Mapping[str, str],
    parsers: Mapping[str, Callable[[str], Any]],
) -> None:
    """A flag for every field of a dataclass that has a ``help`` in its metadata.

    ``groups`` maps the metadata's ``group`` to its title. A field whose default is no number and
    no text needs an entry in ``parsers``. A flag that is not given leaves no attribute behind.
    """
    metavars = {int: "N", float: "X"}
    titled = {name: parser.add_argument_group(title) for name, title in groups.items()}
    for option in dataclasses.fields(options):
        about = option.metadata
        if "help" not in about:
            continue
        flag = about.get("flag", "--" + option.name.replace("_", "-"))
        kind = type(option.default)
        shown = about.get("shown_default", option.default)
        titled[about["group"]].add_argument(
            flag,
            dest=option.name,
            type=parsers.get(option.name, kind),
            choices=about.get("choices"),
            metavar=about.get("metavar", None if about.get("choices") else metavars.get(kind)),
            default=argparse.SUPPRESS,
            help=about["help"] if shown is None else f"{about['help']} (default: {shown})",
        )


def given_fields(args: argparse.Namespace, options: type[Any]) -> dict[str, Any]:
    """The values of the flags of ``add_field_flags`` that were given."""
    names = [option.name for option in dataclasses.fields(options)]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def add_model_flags(
    parser: argparse.ArgumentParser, *, decoding: bool = True, draft_model: bool = True
) -> None:
    """Which model to use and how to load it; with ``decoding`` also how to decode with it."""
    from ..schedule import POLICIES  # loads numpy, which the other flags do not need

    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="M",
        help="a name from `dspark models`, a folder or a Hub id (default: %(default)s)",
    )
    group.add_argument(
        "--drafter",
        metavar="D",
        help="a drafter's folder or Hub id, or none (default: the model's own drafter)",
    )
    if draft_model:
        group.add_argument(
            "--draft-model",
            metavar="M",
            help="a small model of the same vocabulary that drafts in place of a drafter",
        )
    if decoding:
        group.add_argument(
            "--method",
            default="auto",
            type=lambda name: METHOD_ALIASES.get(name, name),
            choices=METHODS,
            help="how to draft; llama.cpp's names do as well (default: %(default)s)",
        )
        group.add_argument(
            "--schedule",
            choices=POLICIES,
            help="how many draft tokens to verify (default: auto; with draft cuts, as they say)",
        )
        group.add_argument(
            "--no-profile",
            dest="profile",
            action="store_false",
            help="do not measure what a round costs; learn it while decoding",
        )
    group.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="the type to compute in (default: the model's own; float32 on the CPU)",
    )
    for flag, what in (("--kv-bits", "KV cache"), ("--drafter-bits", "drafter")):
        group.add_argument(
            flag, type=int, choices=(4, 8), metavar="N", help=f"quantise the {what} to 4 or 8 bits"
        )
    group.add_argument(
        "--no-copy",
        dest="copy",
        action="store_false",
        help="do not copy earlier text as a draft where the text repeats itself",
    )
    group.add_argument(
        "--context",
        type=count,
        default=0,
        metavar="N",
        help="longest context in tokens (default: as the model allows)",
    )
    add_cache_flag(group)


def add_cache_flag(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--cache-dir", type=Path, metavar="DIR", help="keep downloaded models in DIR"
    )


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for flag, kind, default, metavar, help_ in (
        ("--temp", float, 0.0, "T", "temperature; 0 takes the most likely token (default: 0)"),
        ("--top-p", float, 1.0, "P", "sample from the most likely tokens of total probability P"),
        ("--top-k", int, 0, "K", "sample from the K most likely tokens"),
        ("--min-p", float, 0.0, "P", "leave out tokens below P times the largest probability"),
        ("--seed", int, None, "N", "seed that makes a sampled reply repeatable"),
    ):
        group.add_argument(flag, type=kind, default=default, metavar=metavar, help=help_)
    group.add_argument(
        "--draft-sampling",
        default=SamplingParams().draft_sampling,
        choices=DRAFT_SAMPLINGS,
        help="how draft tokens are drawn when sampling (default: %(default)s)",
    )
    for name, off in (("repetition", 1.0), ("presence", 0.0), ("frequency", 0.0)):
        group.add_argument(
            f"--{name}-penalty",
            type=float,
            default=off,
            metavar="X",
            help=f"{name} penalty over the last 20 tokens (default: {off:g}, off)",
        )


def add_cut_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("draft cuts")
    group.add_argument(
        "--draft-length", type=count, metavar="N", help="verify at most N draft tokens per round"
    )
    for flag, of in (
        ("--p-min", "confidence"),
        ("--p-survival-min", "survival (the product of the confidences so far)"),
    ):
        group.add_argument(
            flag,
            type=float,
            default=0.0,
            metavar="P",
            help=f"end a draft before the first token with a {of} below P",
        )


# -- options -------------------------------------------------------------------------------------


def load_options(args: argparse.Namespace, **more: Any) -> LoadOptions:
    """Raises UsageError for flags that contradict each other."""
    from ..loading import LoadOptions

    idle = "off" if args.schedule == "off" else "none" if args.method == "none" else ""
    if idle and args.schedule not in (None, "auto", "off"):
        raise UsageError(
            f"--method none drafts nothing for --schedule {args.schedule} to cut", "leave one out"
        )
    if idle and any(getattr(args, n, None) for n in ("draft_length", "p_min", "p_survival_min")):
        flag = "--method none" if idle == "none" else "--schedule off"
        raise UsageError(f"{flag} drafts nothing that could be cut", "leave the draft cuts out")
    given = {
        f.name: getattr(args, f.name) for f in dataclasses.fields(LoadOptions) if f.name in args
    }
    given["schedule"] = args.schedule or _schedule(args)
    return LoadOptions(**{**given, **more})


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=args.temp,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        draft_sampling=args.draft_sampling,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
    )


def cuts(args: argparse.Namespace) -> Cuts:
    return Cuts(
        draft_length=args.draft_length, p_min=args.p_min, p_survival_min=args.p_survival_min
    )


def _schedule(args: argparse.Namespace) -> str:
    """The schedule that draft cuts stand for: then nothing else decides."""
    if args.p_min or args.p_survival_min:
        return "threshold"
    return "auto" if args.draft_length is None else "fixed"
