"""The command line: one table of sub-commands, each a module that is imported only when it runs.

Owns the dispatch and what every sub-command shares: exit codes (0 done, 1 the operation failed, 2 bad usage, 3 no
daemon to talk to, 130 interrupted).  A sub-command is a module with `add_arguments(parser)` and `run(arguments)`.
"""

import argparse
import errno
import importlib
import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from melld import __version__
from melld.engine.image_library import make_importable
from melld.nearest import did_you_mean

DONE, FAILED, BAD_USAGE, NO_DAEMON, INTERRUPTED = 0, 1, 2, 3, 130


class SubCommand(NamedTuple):
    """A sub-command's module, and its line in the help."""

    module: str
    help: str


COMMANDS: Mapping[str, SubCommand] = {
    "serve": SubCommand("melld.cli.serve", "serve models until stopped"),
    "status": SubCommand("melld.cli.status", "show workers and requests, once or live (also: ps)"),
    "models": SubCommand("melld.cli.models", "list the served models, loaded or not"),
    "load": SubCommand("melld.cli.load", "load one of several models ahead of its first request"),
    "unload": SubCommand("melld.cli.unload", "unload one of several models"),
    "why": SubCommand("melld.cli.why", "explain what happened to a request, when and why"),
    "migrate": SubCommand("melld.cli.migrate", "move a running request to another worker"),
    "drain": SubCommand("melld.cli.upkeep.drain", "take a worker out of service and free its device"),
    "resume": SubCommand("melld.cli.upkeep.resume", "return a drained worker to service"),
    "renew": SubCommand("melld.cli.upkeep.renew", "replace the daemon with newer code or settings, without downtime"),
    "run": SubCommand("melld.cli.borrowing.command", "lend a device to a program while it runs"),
    "check-config": SubCommand("melld.cli.check_config", "validate a configuration"),
    "simulate": SubCommand("melld.cli.simulation.command", "try scheduling policies on a trace, without GPUs"),
    "install-service": SubCommand("melld.cli.install_service", "install or remove melld's systemd units"),
    "demo-model": SubCommand("melld.cli.demo_model", "create a tiny model for trying melld"),
}
SYNONYMS: Mapping[str, str] = {"ps": "status"}
"""Names that other servers use for the same command."""
HINTS: Mapping[str, str] = {"start": "serve", "list": "models", "ls": "models", "top": "status"}
"""Commands of other servers, and the command to suggest for each."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sub-command that `argv` (without the program's name) asks for, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _fill_standard_descriptors()
    if sys.stdout is None:  # `melld status >&-`
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  open to the end
    name = ""
    try:
        name = _command(words[:1])
        module = importlib.import_module(COMMANDS[name].module)
        parser = argparse.ArgumentParser(prog=f"melld {name}")
        module.add_arguments(parser)
        arguments, unknown = parser.parse_known_args(words[1:])
        if unknown:
            parser.error(f"unknown argument: {' '.join(unknown)}{_flag_near(unknown[0], parser)}")
        make_importable()
        _encode_output(json=getattr(arguments, "json", False))
        code = int(module.run(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `melld check-config | head -n 1`: the reader closed the pipe
        _drop_output()
        return DONE if name != "serve" else FAILED
    except OSError as error:
        if error.errno != errno.ENOSPC or name == "serve":
            raise
        _drop_output()
        print(f"melld {name}: cannot write the output: {error.strerror}", file=sys.stderr)
        return FAILED
    except SystemExit as exited:  # argparse has printed the reason
        return exited.code if isinstance(exited.code, int) else BAD_USAGE
    except KeyboardInterrupt:
        return INTERRUPTED


def _encode_output(*, json: bool) -> None:
    """Write JSON as UTF-8, and escape letters of a model's name that a terminal lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        sys.stdout.reconfigure(encoding="utf-8" if json else None, errors="backslashreplace")


def _drop_output() -> None:
    """Discard pending output, so that the interpreter does not try to write it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fill_standard_descriptors() -> None:
    """Open what is closed of descriptors 0 to 2 (`<&-`), which libuv aborts on closing as a socket of its own."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free one, so this one


def _command(words: Sequence[str]) -> str:
    """Return the sub-command that the first word names; exit with a hint if there is no such command."""
    parser = _parser()
    for word in words:
        if word in SYNONYMS:
            return SYNONYMS[word]
        if not word.startswith("-") and word not in COMMANDS:
            hint = did_you_mean(HINTS.get(word, word), COMMANDS) or f": {', '.join(COMMANDS)}"
            parser.error(f"unknown command {word!r}{hint}")
    return str(parser.parse_args(words).command)


def _flag_near(unknown: str, parser: argparse.ArgumentParser) -> str:
    """Return a hint at a known flag that `unknown` resembles, or an empty string."""
    known = re.findall(r"--[a-z][\w-]+", parser.format_usage())
    if parser.prog in ("melld serve", "melld check-config"):
        from melld.engine.vllm_options import option_kinds

        known += [f"--{option.replace('_', '-')}" for option in option_kinds()]
    return did_you_mean(unknown.partition("=")[0].replace("_", "-"), known) if unknown.startswith("--") else ""


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="melld",
        description="An LLM serving daemon that keeps running requests packed onto as few GPUs as possible.",
        epilog=f"commands:\n{listing}\n\nRun `melld COMMAND --help` for details.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"melld {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    return parser
