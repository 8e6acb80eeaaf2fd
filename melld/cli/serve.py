"""`melld serve`: run the daemon in the foreground.

Owns the process's logging, its event loop and its exit code.
"""

import argparse
import asyncio
import logging
import os
import resource
import sys

from melld.cli import BAD_USAGE, DONE, FAILED, INTERRUPTED
from melld.cli.config_flags import add_config_flags, load_config
from melld.daemon.renewal.channel import failure_teller
from melld.daemon.renewal.stand_in import become_stand_in
from melld.errors import ConfigError, MelldError
from melld.log_lines import begin_logging
from melld.output import Output

DESCRIPTORS = 65_536
"""Open files to ask for: a shell's limit, often 1,024, is meant for select(); the systemd unit sets the same."""
LEAST_DESCRIPTORS = 128
"""With fewer there are none for clients: the daemon and its workers take some 30, and 64 are left to spare."""


class TooFewDescriptors(MelldError):
    """The limit on open files is too low to serve clients."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `melld serve`."""
    parser.description = "Serve models in the foreground until SIGTERM or Ctrl-C; running requests may then finish."
    parser.epilog = "Exit codes: 0 clean shutdown, 1 failed to start or had to stop, 2 bad configuration."
    parser.add_argument("model_word", metavar="MODEL", nargs="?", help="same as --model MODEL")
    add_config_flags(parser)
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; return 0 after an orderly end, 1 if it could not start, 2 for a bad configuration."""
    output = Output(*(None if stream is None else stream.fileno() for stream in (sys.stdout, sys.stderr)))
    begin_logging(arguments.log_level.upper(), output.error)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # huggingface_hub logs a line per request
    logging.getLogger("torch._library.triton").addFilter(lambda _: False)  # the CPU build never has Triton
    tell_failure = failure_teller(os.environ)
    try:
        _allow_descriptors()
        return _serve(arguments, output)
    except ConfigError as error:
        tell_failure(str(error))
        output.error.write(f"melld serve: {error}\n")
        return BAD_USAGE
    except KeyboardInterrupt:  # before the daemon handles signals itself
        output.say("melld: stopped")
        return INTERRUPTED
    except MelldError as error:
        tell_failure(str(error))
        output.error.write(f"melld serve: {error}\n")
        return FAILED
    finally:
        output.close()


def _serve(arguments: argparse.Namespace, output: Output) -> int:
    config = load_config(with_model(arguments), os.environ)
    import uvloop

    from melld.daemon.lifecycle import Daemon

    async def serve() -> tuple[int, bool]:
        daemon = Daemon(config, output.say, lambda: load_config(arguments, os.environ, again=True))
        await daemon.run()
        code = FAILED if daemon.failed else DONE
        if daemon.is_cut_short:  # the interpreter would wait for a thread that imports
            output.close()
            os._exit(code)
        return code, daemon.succession.needs_stand_in

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code, needs_stand_in = runner.run(serve())
    if needs_stand_in:
        output.close()
        become_stand_in()
    return code


def with_model(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments with MODEL as --model.

    Raises:
        ConfigError: they name two models.
    """
    if arguments.model_word is not None:
        if arguments.model not in (None, arguments.model_word):
            raise ConfigError("MODEL", f"is {arguments.model_word} but --model is {arguments.model}: give only one")
        arguments.model = arguments.model_word
    return arguments


def _allow_descriptors() -> None:
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = max(allowed, min(most, DESCRIPTORS))
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    if allowed < LEAST_DESCRIPTORS:
        raise TooFewDescriptors(
            f"the open file limit of {allowed} is too low to serve clients: raise it to {LEAST_DESCRIPTORS} (ulimit "
            "-Hn)"
        )
