"""Flags that several commands share, and what they mean as options of the engine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..registry import DEFAULT_MODEL
from ..request import DRAFT_SAMPLINGS, METHOD_ALIASES, METHODS, Cuts, SamplingParams
from ..schedule import POLICIES
from .numbers import count

if TYPE_CHECKING:
    from ..loading import LoadOptions


def add_model_flags(parser: argparse.ArgumentParser, *, decoding: bool = True) -> None:
    """Which model and how to load it; ``decoding``: also how to decode with it."""
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
        help="a drafter's folder or Hub id, or none (default: the model's)",
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
            default=None,
            choices=POLICIES,
            help="how to choose what is verified (default: auto; with draft cuts, just these)",
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
        help="what to compute in (default: as the model is; float32 on the CPU)",
    )
    group.add_argument(
        "--kv-bits",
        type=int,
        choices=(4, 8),
        metavar="N",
        help="quantise the KV cache to 4 or 8 bits",
    )
    group.add_argument(
        "--drafter-bits", type=int, choices=(4, 8), metavar="N", help="quantise the drafter"
    )
    group.add_argument(
        "--no-copy",
        dest="copy",
        action="store_false",
        help="leave all drafting to the drafter, also where the text repeats itself",
    )
    group.add_argument("--context", type=count, default=0, metavar="N", help="longest context")
    group.add_argument("--cache-dir", type=Path, metavar="DIR", help="keep models in DIR")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--temp", type=float, default=0.0, metavar="T", help="temperature (default: 0)"
    )
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="nucleus (default: off)"
    )
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="top k (default: off)")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="min-p (default: off)")
    group.add_argument("--seed", type=int, metavar="N", help="makes a sampled reply repeatable")
    group.add_argument(
        "--draft-sampling",
        default=SamplingParams().draft_sampling,
        choices=DRAFT_SAMPLINGS,
        help="how drafts are drawn when sampling (default: %(default)s)",
    )
    for name in ("repetition", "presence", "frequency"):
        group.add_argument(
            f"--{name}-penalty",
            type=float,
            default=1.0 if name == "repetition" else 0.0,
            metavar="X",
            help=f"{name} penalty over the last 20 tokens (default: off)",
        )


def add_cut_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("draft cuts")
    group.add_argument(
        "--draft-length", type=count, metavar="N", help="verify at most N drafted tokens a round"
    )
    group.add_argument(
        "--p-min", type=float, default=0.0, metavar="P", help="stop before a confidence below P"
    )
    group.add_argument(
        "--p-survival-min",
        type=float,
        default=0.0,
        metavar="P",
        help="stop before a survival (product of confidences) below P",
    )


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
    return LoadOptions(
        model=args.model,
        drafter=args.drafter,
        method=args.method,
        schedule=args.schedule or _schedule(args),
        profile=getattr(args, "profile", True),
        dtype=args.dtype,
        kv_bits=args.kv_bits,
        drafter_bits=args.drafter_bits,
        context=args.context,
        copy=args.copy,
        cache_dir=args.cache_dir,
        **more,
    )


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
    """Who gives limits means them: then nothing else decides."""
    if args.p_min or args.p_survival_min:
        return "threshold"
    return "auto" if args.draft_length is None else "fixed"
