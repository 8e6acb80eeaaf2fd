r"""The daemon's log format: one line per record, whatever the text contains.

    2026-01-31 12:00:00,000 WARNING melld.api: what happened; line breaks and control characters are written as \n, \x1b
      | Traceback (most recent call last):      every line of a traceback begins with this mark, no record does

so that no text of a client, a model or a library can look like a record.  What vLLM's parsers of answers fail on is
told at level DEBUG only, and without its traceback: any client's limit can cut a call of a tool, and a traceback may
quote it.
"""

import copy
import logging
from io import TextIOBase
from typing import TextIO

from melld.printable import printable

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MARK = "  | "
PARSERS = ("vllm.tool_parsers.", "vllm.parser.", "vllm.reasoning.")


class OneLine(logging.Formatter):
    """Formatter of all records of the process's log."""

    def __init__(self) -> None:
        super().__init__(FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's lines."""
        fresh = copy.copy(record)
        fresh.exc_info = None if record.name.startswith(PARSERS) else record.exc_info
        fresh.exc_text = None  # another handler's formatter may have cached its traceback here
        return super().format(fresh)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's name
        """Return the record's own line."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: object) -> str:  # noqa: N802  logging's name
        """Return a traceback, each line of it marked."""
        return _marked(super().formatException(ei))  # type: ignore[arg-type]

    def formatStack(self, stack_info: str) -> str:  # noqa: N802  logging's name
        """Return a stack, each line of it marked."""
        return _marked(stack_info)


def _marked(text: str) -> str:
    return "\n".join(MARK + printable(line) for line in text.split("\n"))


def begin_logging(level: str, stream: TextIO | TextIOBase) -> None:
    """Log to this stream in this format, Python's warnings included."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(OneLine())
    handler.addFilter(lambda record: level == "DEBUG" or not record.name.startswith(PARSERS))
    logging.basicConfig(level=level, handlers=[handler])
    logging.captureWarnings(True)


def take_over_loggers() -> None:
    """Route the loggers of the libraries imported so far to the process's handler; vLLM and others bring their own."""
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and logger.handlers:
            logger.handlers.clear()
            logger.propagate = True
