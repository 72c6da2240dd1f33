"""The ``dspark`` command: finds the subcommand, imports only that one, runs it.

Errors, Ctrl+C and a closed pipe end the process here, in the same way for all subcommands. The
module of a subcommand has ``configure(parser)``, which adds its flags, and ``run(args)``, which
returns the exit code; importing it does not load mlx.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ..distribution import version_text, warn_of_others
from ..errors import DsparkError

COMMANDS = {
    "bench": "compare methods and schedules side by side",
    "calibrate": "fit a drafter's confidences to what the target accepts",
    "eval": "measure how many draft tokens the target accepts",
    "generate": "write a reply to one prompt",
    "models": "list the known models, or download one",
    "profile": "measure what a round costs on this machine",
    "train": "train a drafter for a target",
}

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line instead of repeating the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_ERROR, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(version_text("dspark"))
        parser.exit()


def make_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser with the flags of ``command`` only: the others cost their imports."""
    parser = _Parser(
        prog="dspark",
        description="Fast, lossless text generation with DSpark speculative decoding on MLX.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, help_ in COMMANDS.items():
        sub = commands.add_parser(name, help=help_, description=f"{help_.capitalize()}.")
        if name == command:
            module = importlib.import_module(f".{name}", __name__)
            module.configure(sub)
            sub.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one ``dspark`` command line and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in argv if not word.startswith("-")), None)
    # mlx does the matrix work of a subcommand; numpy's own BLAS threads would only wait and spin.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from .output import abandon_stdout, prepare_streams

        prepare_streams()
        warn_of_others("dspark")
        args = make_parser(command).parse_args(argv)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except DsparkError as error:
        print(f"dspark: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        abandon_stdout()
        return EXIT_BROKEN_PIPE
    except OSError as error:  # a full disk, or a file that may not be read
        where = f": {error.filename}" if error.filename else ""
        print(f"dspark: error: {error.strerror or error}{where}", file=sys.stderr)
        abandon_stdout()
        return EXIT_ERROR
