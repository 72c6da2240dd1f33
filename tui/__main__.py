"""``dspark-chat``: reads the command line, then opens the full screen or prints one answer."""

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
# Seconds after which a waiting thread gets its turn. While the display is at work the engine's
# thread waits this long; Python's own 5 ms would cost it several times a round.
SWITCH_SECONDS = 0.001
_METAVARS = {str: "TEXT", float: "X"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_ERROR, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(version_text("dspark-chat"))
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    from .settings import OPTIONS

    parser = _Parser(prog="dspark-chat", description="Chat in the terminal and see DSpark at work.")
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="the first message")
    parser.add_argument(
        "--once", action="store_true", help="print the answer and exit, without the full screen"
    )
    parser.add_argument("--continue", dest="resume", action="store_true", help="the newest chat")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="play a recorded trace")
    parser.add_argument("--speed", type=float, metavar="X", help="speed of the replay (1)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="record what the engine does")
    parser.add_argument(
        "--no-patches",
        dest="patches",
        action="store_false",
        help="paint and read keys Textual's own way, which is slower",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    group = parser.add_argument_group("settings, for this run only")
    for name, option in OPTIONS.items():
        about = option.about
        if about.flag:
            choices = f" ({', '.join(map(str, about.choices))})" if about.choices else ""
            metavar = _METAVARS.get(option.kind, "N")
            group.add_argument(about.flag, dest=name, metavar=metavar, help=about.help + choices)
    return parser


def pinned(args: argparse.Namespace) -> dict[str, Any]:
    """The settings given as flags, checked as those of the file are."""
    from .settings import OPTIONS, parse

    values = {}
    for name, option in OPTIONS.items():
        text = getattr(args, name, None)
        if text is not None:
            try:
                values[name] = parse(name, text)
            except UsageError as error:
                raise UsageError(f"{option.about.flag}: {error.message}", error.hint) from None
    if values.get("theme"):
        from .themes import known  # only then, as it imports Textual

        if values["theme"] not in known():
            raise UsageError(f"--theme: theme must be one of {', '.join(known())}")
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


def run(args: argparse.Namespace) -> int:
    from . import paths
    from .engine_client import EngineClient
    from .replay import ReplayEngine, recording
    from .settings import Preferences, SettingsFile

    _check_replay(args)
    values = pinned(args)
    events = recording(args.replay) if args.replay else []
    prompt = " ".join(args.prompt)
    once = args.once or not (sys.stdin.isatty() and sys.stdout.isatty())
    if once:
        prompt = _with_input(prompt)
    elif not sys.stderr.isatty():
        raise UsageError("the screen is drawn on stderr, which is redirected", "leave out 2>")
    replay = ReplayEngine(events, args.speed or 1.0, play=not prompt) if args.replay else None
    client = EngineClient(replay, trace=args.trace)
    preferences = Preferences(SettingsFile(paths.settings_file()), values)
    if once:
        from .once import answer

        return answer(client, prompt, preferences.now)
    return _full_screen(args, client, prompt, preferences)


def _check_replay(args: argparse.Namespace) -> None:
    if args.speed is not None and not args.speed > 0:
        raise UsageError("--speed must be above 0")
    if args.speed is not None and not args.replay:
        raise UsageError("--speed is the speed of a recording", "add --replay FILE")
    if args.replay and args.trace:
        raise UsageError("--trace records an engine, --replay has none", "leave out one of them")


def _full_screen(args: argparse.Namespace, client: Any, prompt: str, preferences: Any) -> int:
    from . import hangup, paths, textual_patches
    from .app import ChatApp, StartOptions
    from .session_store import SessionStore

    textual_patches.enabled = args.patches
    # The chats of a recording are not the user's own.
    store = SessionStore(None if args.replay else paths.sessions_file())
    newest = next(iter(store.entries(limit=1)), None) if args.resume else None
    start = StartOptions(prompt, newest.session if newest else None)
    app = ChatApp(client, store, preferences, start)
    hangup.watch(sys.stderr.fileno())
    sys.setswitchinterval(SWITCH_SECONDS)
    app.run()
    if app.crash:
        print(app.crash, file=sys.stderr)
        return 1
    return 0


def _with_input(prompt: str) -> str:
    """The prompt followed by what is piped in. Raises UsageError if there is neither."""
    piped = ""
    if not sys.stdin.isatty():
        try:
            # UTF-8, whatever the locale says.
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
