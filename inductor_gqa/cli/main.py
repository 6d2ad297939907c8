"""The command line's front: one parser, four commands, exit codes.

A command is a module with `add_arguments(parser)` and `run(args) -> int`; its first docstring line
is its help. Commands import torch inside `run`, so `--help` and a mistyped option answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import warnings
from collections.abc import Sequence

from inductor_gqa.cli import bench, demo, doctor, explain
from inductor_gqa.cli.terminal import CommandError, complain

COMMANDS = (("demo", demo), ("doctor", doctor), ("explain", explain), ("bench", bench))

NO_NUMPY = "Failed to initialize NumPy"  # how the warning begins

EPILOG = """\
start here:
  %(prog)s doctor                    is this machine ready, and what to mend
  %(prog)s demo                      a small model before and after, in about a minute
  %(prog)s explain llama             what is fused in a Transformers architecture
  %(prog)s explain my_file.py:model  what is fused in a model of yours

exit codes:
  0  it went well
  1  the answer is no: an error rule failed, a site was left, this machine lacks something
  2  the command line could not be understood
  3  the command needs a package that is not installed; the message names it
  4  the code that was to be explained raised an error; it is shown with its traceback

Every command takes --json: one object on stdout, nothing else there. Progress goes to stderr, and
only to a terminal. Colour is for terminals as well; NO_COLOR=1 turns it off.
"""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line as one parser."""
    parser = argparse.ArgumentParser(
        prog="inductor-gqa",
        description="Fused GQA + RoPE attention in torch.compile: see it work, see why not.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS:
        summary, _, body = (module.__doc__ or "").partition("\n")
        command = commands.add_parser(
            name,
            help=summary[:1].lower() + summary[1:].rstrip("."),
            description=f"{summary}\n{textwrap.dedent(body)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print one JSON object, no table")
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = build_parser().parse_args(argv)
    # torch runs without NumPy, and so do we: its absence is not worth a line in every command, nor
    # in each of the processes that compile, which read the variable.
    warnings.filterwarnings("ignore", message=NO_NUMPY)
    filters = os.environ.get("PYTHONWARNINGS", "")
    if NO_NUMPY not in filters:
        os.environ["PYTHONWARNINGS"] = f"{filters},ignore:{NO_NUMPY}".lstrip(",")
    # explain() compiles without caches on purpose.
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    try:
        return int(args.run(args))
    except CommandError as error:
        complain(str(error))
        return error.exit_code
    except BrokenPipeError:  # `... | head` closed our output: not a mistake of anybody
        sys.stderr.close()
        return 0
