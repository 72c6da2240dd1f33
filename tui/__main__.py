"""``dspark-chat``: reads the command line, then the full screen or one printed answer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from dspark_mlx.distribution import version_text, warn_of_others
from dspark_mlx.errors import DsparkError, UsageError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
SWITCH_SECONDS = 0.001

# Flag, setting, metavar, help. Values are checked as the settings file's are.
_SETTINGS = (
    ("--model", "model", "M", "a name from `dspark models`, a folder or a Hub id"),
    ("--drafter", "drafter", "D", "a drafter's folder or Hub id, or none"),
    ("--method", "method", "X", "auto, dspark, lookup or none"),
    ("--schedule", "schedule", "X", "how much of a draft is verified, such as auto or fixed"),
    ("--system", "system", "S", "system prompt"),
    ("--temp", "temperature", "T", "temperature (0: always the most likely token)"),
    ("--top-p", "top_p", "P", "nucleus (1: off)"),
    ("--top-k", "top_k", "K", "top k (0: off)"),
    ("--min-p", "min_p", "P", "min-p (0: off)"),
    ("--seed", "seed", "N", "makes a sampled reply repeatable"),
    ("--max-tokens", "max_tokens", "N", "at most so many a reply (-1: no limit)"),
    ("--draft-length", "draft_length", "N", "verify at most N drafted tokens a round"),
    ("--p-min", "p_min", "P", "stop a draft before a confidence below P"),
    ("--p-survival-min", "p_survival_min", "P", "stop a draft before a survival below P"),
    ("--thinking", "thinking", "X", "auto, on or off"),
    ("--kv-bits", "kv_bits", "N", "8 or 4: quantise the KV cache"),
    ("--theme", "theme", "NAME", "colours"),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_ERROR, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(version_text("dspark-chat"))
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="dspark-chat", description="Chat in the terminal and see DSpark at work.")
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="the first message")
    parser.add_argument(
        "--once", action="store_true", help="print the answer and exit, without the full screen"
    )
    parser.add_argument("--continue", dest="resume", action="store_true", help="the newest chat")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="play a recorded trace")
    parser.add_argument("--speed", type=float, metavar="X", help="of the replay (1)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="record what the engine does")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    group = parser.add_argument_group("settings, for this time only")
    for flag, name, metavar, help_text in _SETTINGS:
        group.add_argument(flag, dest=name, metavar=metavar, help=help_text)
    return parser


def pinned(args: argparse.Namespace) -> dict[str, Any]:
    """The settings given as flags, checked."""
    from .settings import parse

    values = {}
    for flag, name, _, _ in _SETTINGS:
        text = getattr(args, name)
        if text is not None:
            try:
                values[name] = parse(name, text)
            except UsageError as error:
                raise UsageError(f"{flag}: {error.message}", error.hint) from None
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Run one ``dspark-chat`` command line and return its exit code."""
    warn_of_others("dspark-chat")
    args = make_parser().parse_args(argv)
    try:
        return run(args)
    except DsparkError as error:
        print(f"dspark-chat: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def run(args: argparse.Namespace, make_engine: Any = None) -> int:
    """``make_engine`` replaces the engine's thread, for tests."""
    from . import paths
    from .backend import Backend, EngineBackend, TracingBackend
    from .replay import ReplayBackend, recording
    from .settings import SettingsFile

    _check_replay(args)
    values = pinned(args)
    if values.get("theme"):
        from . import themes  # only then, as it brings Textual along

        if values["theme"] not in themes.known():
            raise UsageError(f"--theme: theme must be one of {', '.join(themes.known())}")
    events = recording(args.replay) if args.replay else []
    prompt = " ".join(args.prompt)
    once = args.once or not (sys.stdin.isatty() and sys.stdout.isatty())
    if once:
        prompt = _with_input(prompt)
    backend: Backend
    if args.replay:
        backend = ReplayBackend(events, args.speed or 1.0, play=not prompt)
    else:
        backend = EngineBackend(make_engine)
    if args.trace:
        backend = TracingBackend(backend, args.trace)
    settings = SettingsFile(paths.settings_file())
    if once:
        import dataclasses

        from .once import answer

        return answer(backend, prompt, dataclasses.replace(settings.load(), **values))
    if not sys.stderr.isatty():
        raise UsageError("the screen is drawn on stderr, which is redirected", "leave out 2>")
    return _full_screen(args, backend, prompt, settings, values)


def _check_replay(args: argparse.Namespace) -> None:
    if args.speed is not None and not args.speed > 0:
        raise UsageError("--speed must be above 0")
    if args.speed is not None and not args.replay:
        raise UsageError("--speed is that of a recording", "add --replay FILE")
    if args.replay and args.trace:
        raise UsageError("--trace records an engine, --replay has none", "leave out one of them")


def _full_screen(
    args: argparse.Namespace, backend: Any, prompt: str, settings: Any, values: dict[str, Any]
) -> int:
    from . import hangup, paths
    from .app import ChatApp, Start
    from .sessions import SessionStore

    # A recording's chats are not the user's own.
    store = SessionStore(None if args.replay else paths.sessions_file())
    newest = next(iter(store.entries(limit=1)), None) if args.resume else None
    start = Start(prompt, newest.session if newest else None, values)
    app = ChatApp(backend, store, settings, start)
    hangup.watch(sys.stderr.fileno())
    # While the display is at work the engine's thread waits this long for its turn: by default
    # five milliseconds, several times a round.
    sys.setswitchinterval(SWITCH_SECONDS)
    app.run()
    if app.crash:
        print(app.crash, file=sys.stderr)
        return 1
    return 0


def _with_input(prompt: str) -> str:
    """The prompt followed by what is piped in; refuses when there is neither."""
    piped = ""
    if not sys.stdin.isatty():
        try:
            # Whatever the locale says: it is UTF-8 or it is refused.
            raw = getattr(sys.stdin, "buffer", None)
            piped = raw.read().decode() if raw else sys.stdin.read()
        except UnicodeDecodeError:
            raise UsageError("the input is not text", "pipe UTF-8 text") from None
    text = f"{prompt}\n\n{piped}" if prompt and piped.strip() else prompt or piped
    if not text.strip():
        raise UsageError("nothing to answer", "give a PROMPT, or pipe text in")
    return text.strip("\n")


if __name__ == "__main__":
    sys.exit(main())
