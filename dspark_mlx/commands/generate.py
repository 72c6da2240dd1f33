"""``dspark generate``: one reply to one prompt, on the terminal or as JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import DsparkError, ModelError, UsageError
from ..events import Event, Finished, Loading, Notice, Prefill, StepDone
from .options import (
    add_cut_flags,
    add_model_flags,
    add_sampling_flags,
    cuts,
    load_options,
    sampling_params,
)
from .output import read_stdin
from .progress import ProgressLine

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..events import Loaded
    from ..request import Request


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt", "-p", required=True, metavar="TEXT", help="the message; - reads standard input"
    )
    parser.add_argument("--system", metavar="S", help="a system message before it")
    parser.add_argument(
        "--raw", action="store_true", help="continue the text as it is, without a chat template"
    )
    parser.add_argument("--max-tokens", "-m", type=int, default=512, metavar="N")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="S", help="end before this text; repeatable"
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="go on past the model's end-of-text token"
    )
    thinking = parser.add_mutually_exclusive_group()
    thinking.add_argument(
        "--thinking", action="store_true", default=None, help="let it think first"
    )
    thinking.add_argument("--no-thinking", dest="thinking", action="store_false")
    add_model_flags(parser)
    add_sampling_flags(parser)
    add_cut_flags(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object at the end")
    output.add_argument("--trace", metavar="FILE", help="record every round, one JSON line each")
    output.add_argument(
        "--verbose", action="store_true", help="say on stderr what was chosen and how it went"
    )


def run(args: argparse.Namespace) -> int:
    request = _request(args)
    from ..trace import TraceWriter

    with contextlib.ExitStack() as stack:
        trace = stack.enter_context(TraceWriter(args.trace)) if args.trace else None
        engine, loaded = _load(args)
        if trace:
            trace.write([loaded])
        if args.verbose:
            _say(f"{loaded.model}: {loaded.method} ({loaded.reason}), schedule {loaded.schedule}")
            if loaded.details:
                _say(loaded.details)
        engine.submit(request)
        result = Result()
        try:
            for events in _steps(engine):
                if trace:
                    trace.write(events)
                text = result.add(events)
                if not args.json:
                    print(text, end="", flush=True)
        except KeyboardInterrupt:
            if not args.json:
                print()
            raise
    if result.end is None or result.end.reason == "error":
        raise ModelError(result.end.message if result.end else "the engine stopped early")
    if args.json:
        # Escapes where the terminal or a pipe has no UTF-8: still the same object.
        plain = not (sys.stdout.encoding or "").lower().startswith("utf")
        print(json.dumps(result.report(), ensure_ascii=plain))
    else:
        print()
    if args.verbose:
        _say(result.summary())
    return 0


class Result:
    """What a run came to, gathered from its events."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.end: Finished | None = None
        self.peak = 0

    def add(self, events: list[Event]) -> str:
        """Take in events; returns the text they add."""
        new = ""
        for event in events:
            if isinstance(event, StepDone):
                self.peak = event.memory.peak
                for token in event.rows[0].tokens:
                    self.tokens.append(token.id)
                    new += token.text
            elif isinstance(event, Finished):
                self.end = event
                new += event.tail
        self.text += new
        return new

    def report(self) -> dict[str, Any]:
        end = self.end
        assert end is not None
        prefilled = end.prompt_tokens - end.reused_tokens
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": end.reason,
            "prompt_tokens": end.prompt_tokens,
            "reused_tokens": end.reused_tokens,
            "generation_tokens": end.generation_tokens,
            "prompt_tps": _per_second(prefilled, end.prompt_seconds),
            "generation_tps": _per_second(end.generation_tokens, end.generation_seconds),
            "first_token_seconds": round(end.first_token_seconds, 4),
            "peak_memory_gb": round(self.peak / 1e9, 3),
            "method": end.method,
            "seed": end.seed,
            "rounds": end.rounds,
            "drafted": end.drafted,
            "scheduled": end.scheduled,
            "accepted": end.accepted,
            "accepted_length": round(end.generation_tokens / max(1, end.rounds), 3),
            "acceptance_by_position": [
                round(s / n, 3) for s, n in zip(end.survived, end.reached, strict=True)
            ],
        }

    def summary(self) -> str:
        r = self.report()
        return (
            f"{r['generation_tokens']} tokens, {r['generation_tps']} tokens/s; "
            f"{r['rounds']} rounds, {r['accepted_length']} tokens a round "
            f"({r['accepted']} of {r['scheduled']} verified drafts accepted); "
            f"prompt {r['prompt_tokens']} tokens, {r['prompt_tps']} tokens/s; "
            f"peak memory {r['peak_memory_gb']} GB"
        )


def _request(args: argparse.Namespace) -> Request:
    from ..request import Request

    prompt = args.prompt
    if prompt == "-":
        prompt = read_stdin()
    if not prompt.strip():
        raise UsageError("the prompt is empty", "give some text with --prompt")
    if args.raw and args.system:
        raise UsageError("--system needs a chat template, which --raw leaves out")
    messages: tuple[dict[str, str], ...] = ()
    if not args.raw:
        system = ({"role": "system", "content": args.system},) if args.system else ()
        messages = (*system, {"role": "user", "content": prompt})
    return Request(
        id="generate",
        prompt=prompt if args.raw else None,
        messages=messages,
        max_tokens=args.max_tokens,
        sampling=sampling_params(args),
        cuts=cuts(args),
        stop=tuple(args.stop),
        thinking=args.thinking,
        ignore_eos=args.ignore_eos,
    )


def _load(args: argparse.Namespace) -> tuple[Engine, Loaded]:
    options = load_options(args, max_rows=1)
    from ..loading import load_engine

    with ProgressLine() as line:

        def report(event: Loading | Notice) -> None:
            if isinstance(event, Loading):
                line(event)

        return load_engine(options, report)


def _steps(engine: Engine) -> Iterator[list[Event]]:
    """The events of each step until the engine has nothing to do; prompt progress on stderr."""
    shown = False
    while engine.active:
        events = engine.step()
        for event in events:
            if isinstance(event, Prefill) and event.done < event.total and sys.stderr.isatty():
                shown = True
                print(f"\r\x1b[Kreading {event.done}/{event.total}", end="", file=sys.stderr)
            elif shown:
                shown = False
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        yield events


def _per_second(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 else 0.0


def _say(text: str) -> None:
    print(f"dspark: {text}", file=sys.stderr)


__all__ = ["DsparkError", "Result", "configure", "run"]
