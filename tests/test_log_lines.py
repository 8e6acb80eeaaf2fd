"""One record, one line: nothing that a client, a model or a library writes can look like a separate record."""

import ast
import io
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.log_lines import MARK, OneLine
from melld.printable import printable, printable_all
from tests.forked import run_python

FORGED = "bad schema\n2026-01-01 00:00:00,000 ERROR melld: all GPUs are on fire\r\n\x1b[2J\x9b1m\u2028\u202e"


def logged(act: object, name: str = "tests.log_lines") -> list[str]:
    """Return the lines that one call on a logger of this name gives."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(OneLine())
    logger = logging.getLogger(name)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        act(logger)  # type: ignore[operator]
    finally:
        logger.removeHandler(handler)
    return written.getvalue().removesuffix("\n").split("\n")


def test_a_text_with_line_breaks_stays_one_line() -> None:
    """What a client has put into an error stays within the record that reports it."""
    (line,) = logged(lambda logger: logger.warning("request %s: %s", "r1", FORGED))
    assert line.endswith(printable(FORGED))
    assert "\\n2026-01-01" in line
    assert line.isprintable()


def test_a_traceback_keeps_its_lines_and_each_is_marked() -> None:
    """It is readable, and nothing in it passes for a record."""

    def fail(logger: logging.Logger) -> None:
        try:
            raise ValueError(FORGED)
        except ValueError:
            logger.exception("request r1 failed", stack_info=True)

    first, *rest = logged(fail)
    assert first.endswith("ERROR tests.log_lines: request r1 failed")
    assert len(rest) > 5
    assert [line for line in rest if not (line.startswith(MARK) and line.isprintable())] == []
    assert any(line == f"{MARK}Traceback (most recent call last):" for line in rest)


def test_an_unparsable_tool_call_is_not_quoted() -> None:
    """Answers stay out of the log: Python's own parser quotes what it fails on in its traceback."""

    def fail(logger: logging.Logger) -> None:
        try:
            ast.parse("[pay(card='4111 1111', cents=01)]")
        except SyntaxError:
            logger.exception("Error in extracting tool call from response.")

    (line,) = logged(fail, "vllm.tool_parsers.pythonic_tool_parser")
    assert line.endswith("Error in extracting tool call from response.")
    assert any("4111" in line for line in logged(fail))


LOG_TWO = """
import logging, sys
from melld.log_lines import begin_logging, take_over_loggers
begin_logging(sys.argv[1], sys.stdout)
take_over_loggers()
for name in ("vllm.tool_parsers.hermes_tool_parser", "vllm.engine"):
    logging.getLogger(name).error("failed")
"""


@pytest.mark.parametrize(("level", "lines"), [("INFO", 1), ("DEBUG", 2)])
def test_a_truncated_tool_call_is_no_error_of_the_daemon(level: str, lines: int) -> None:
    """Any client's `max_tokens` can cut one: nobody is woken for it."""
    told = run_python("-c", LOG_TWO, level).stdout.splitlines()
    assert len(told) == lines
    assert told[-1].endswith("ERROR vllm.engine: failed")


@given(st.text(st.characters(codec=None)))
def test_any_text_becomes_one_line_without_control_characters(text: str) -> None:
    """No terminal and no log reader sees more than text; what is harmless is left unchanged."""
    shown = printable(text)
    assert len(shown.splitlines()) <= 1
    assert "\x1b" not in shown
    shown.encode()
    assert printable(shown) == shown


def test_words_of_any_language_are_left_alone() -> None:
    """A model's name may be written in any script."""
    assert printable("Größe 模型 😀 نموذج") == "Größe 模型 😀 نموذج"
    assert printable_all({"a\x1b": ["\n", 1, None, {"b": "c"}]}) == {"a\\x1b": ["\\n", 1, None, {"b": "c"}]}


@pytest.mark.parametrize("library", ["torch", "transformers.utils.logging"])
def test_libraries_write_through_the_same_handler(library: str) -> None:
    """torch and transformers bring their own handlers, whose lines could be forged."""
    code = f"""
import logging, sys, warnings
from melld.log_lines import begin_logging, take_over_loggers
begin_logging("INFO", sys.stderr)
import {library}
take_over_loggers()
logging.getLogger("{library.split(".")[0]}.some.module").error("first\\nsecond")
warnings.warn("third\\nfourth")
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    told = [line for line in (done.stdout + done.stderr).splitlines() if "first" in line or "third" in line]
    assert ["first\\nsecond" in told[0], "third\\nfourth" in told[1], len(told)] == [True, True, 2]
    assert done.stdout == ""
