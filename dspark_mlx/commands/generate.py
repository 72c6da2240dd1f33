"""``dspark generate``: one reply to one prompt, on the terminal or as JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, UsageError
from ..events import Event, Finished, Prefill, StepDone
from .options import (
    add_cut_flags,
    add_model_flags,
    add_sampling_flags,
    cuts,
    load_options,
    sampling_params,
)
from .output import read_stdin, say
from .progress import ProgressLine

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..request import Request
    from ..trace import TraceWriter


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompt", "-p", required=True, metavar="TEXT", help="the message; - reads standard input")
    add("--system", metavar="S", help="a system message before the prompt")
    add("--raw", action="store_true", help="continue the prompt itself, without a chat template")
    add(
        "--max-tokens",
        "-m",
        type=int,
        default=512,
        metavar="N",
        help="longest reply in tokens; -1 for no limit (default: %(default)s)",
    )
    add(
        "--stop",
        action="append",
        default=[],
        metavar="S",
        help="end the reply before this text; may be given several times",
    )
    add("--ignore-eos", action="store_true", help="go on after the model's end-of-text token")
    thinking = parser.add_mutually_exclusive_group()
    thinking.add_argument(
        "--thinking", action="store_true", default=None, help="let the model think first"
    )
    thinking.add_argument(
        "--no-thinking", dest="thinking", action="store_false", help="answer without thinking"
    )
    add_model_flags(parser)
    add_sampling_flags(parser)
    add_cut_flags(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object at the end")
    output.add_argument(
        "--trace", metavar="FILE", help="write every event to FILE, one JSON line each"
    )
    output.add_argument(
        "--verbose", action="store_true", help="say on stderr how the reply was made"
    )


def run(args: argparse.Namespace) -> int:
    request = _request(args)
    from ..loading import load_engine
    from ..trace import TraceWriter

    with contextlib.ExitStack() as stack:
        trace = stack.enter_context(TraceWriter(args.trace)) if args.trace else None
        options = load_options(args, max_rows=1)
        with ProgressLine() as line:
            engine, loaded = load_engine(options, line)
        if trace:
            trace.write([loaded])
        if args.verbose:
            chosen = f"{loaded.method} ({loaded.reason}), schedule {loaded.schedule}"
            say(f"dspark: {loaded.model}: {chosen}")
            if loaded.details:
                say(f"dspark: {loaded.details}")
        engine.submit(request)
        try:
            reply = print_reply(_events(engine, trace), _ignore if args.json else _write)
        except KeyboardInterrupt:
            if not args.json:
                print()
            raise
    if args.json:
        # Escapes where the terminal or a pipe has no UTF-8: still the same object.
        plain = not (sys.stdout.encoding or "").lower().startswith("utf")
        print(json.dumps(reply.to_json(), ensure_ascii=plain))
    else:
        print()
    if args.verbose:
        say(f"dspark: {reply.summary()}")
    return 0


def print_reply(events: Iterable[Event], write: Callable[[str], object]) -> FinishedReply:
    """Write the text of one request's events as it comes, until the reply has ended.

    While a long prompt is read, a line on stderr says how far. Raises ModelError when the engine
    gives the reply up, or stops before its end.
    """
    reply = FinishedReply()
    with ProgressLine() as line:
        for event in events:
            if isinstance(event, Prefill) and event.done < event.total:
                line.show("reading the prompt", event.done, event.total)
            elif isinstance(event, StepDone | Finished):
                line.clear()
                if text := reply.add(event):
                    write(text)
            if reply.end is not None:
                break
    if reply.end is None or reply.end.reason == "error":
        raise ModelError(
            reply.end.message if reply.end else "the engine stopped early",
            reply.end.hint if reply.end else "",
        )
    return reply


@dataclass
class FinishedReply:
    """One reply, gathered from the events of its rounds; ``peak`` is in bytes."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    end: Finished | None = None
    peak: int = 0

    def add(self, event: StepDone | Finished) -> str:
        """Take in an event. Returns the text that it adds."""
        if isinstance(event, Finished):
            self.end, new = event, event.tail
        else:
            self.peak = event.memory.peak
            tokens = event.rows[0].tokens
            self.tokens += [token.id for token in tokens]
            new = "".join(token.text for token in tokens)
        self.text += new
        return new

    def to_json(self) -> dict[str, Any]:
        """What ``dspark generate --json`` prints."""
        end = self.end
        assert end is not None
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": end.reason,
            "prompt_tokens": end.prompt_tokens,
            "reused_tokens": end.reused_tokens,
            "generation_tokens": end.generation_tokens,
            "prompt_tps": _rate(end.prompt_tokens - end.reused_tokens, end.prompt_seconds),
            "generation_tps": _rate(end.generation_tokens, end.generation_seconds),
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
        """The same in one line, for a person."""
        r = self.to_json()
        return (
            f"{r['generation_tokens']} tokens, {r['generation_tps']} tokens/s; "
            f"{r['rounds']} rounds, {r['accepted_length']} tokens a round "
            f"({r['accepted']} of {r['scheduled']} verified draft tokens accepted); "
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


def _events(engine: Engine, trace: TraceWriter | None) -> Iterator[Event]:
    """The events of each step until the engine has nothing to do."""
    while engine.active:
        events = engine.step()
        if trace:
            trace.write(events)
        yield from events


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _ignore(text: str) -> None:
    """For --json: the text is printed at the end."""


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 3) if seconds > 0 else 0.0
