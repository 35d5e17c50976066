"""The ``thinwire`` command: one module per subcommand.

Every module here has ``add_parser(subparsers)`` and ``run(args) -> int``. Exit status: 0 done, 1 the run failed
(one readable line on standard error), 2 wrong arguments.
"""

import argparse
import importlib
import signal
import sys

COMMANDS = (
    "demo",
    "bench",
    "lab",
    "compressors",
    "kernels",
    "record",
    "replay",
    "selfcheck",
    "probe",
    "advise",
    "whatif",
    "reproduce",
    "server",
    "keys",
    "launch",
)


def interrupt_on_signals() -> None:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does, so that what was started is ended."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays in force
            signal.signal(number, interrupt)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run one subcommand, return its exit status."""
    from thinwire import __version__
    from thinwire.errors import ThinwireError

    parser = argparse.ArgumentParser(prog="thinwire", description="Train PyTorch models over slow networks.")
    parser.add_argument("--version", action="version", version=f"thinwire {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"thinwire.cli.{name}")
        module.add_parser(subparsers).set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except ThinwireError as error:
        print(f"thinwire: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("thinwire: interrupted", file=sys.stderr)
        return 130
