"""Clients' data and keys are never printed, and nothing that others write is unpickled."""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.api.http_client import CHAT, chat, completion, connect, post, request
from tests.forked import run_melld
from tests.serve.daemon_process import DaemonProcess

ROOT = Path(__file__).parents[2]
KEY = "key-that-nobody-may-read"
TEXT = "Text-that-nobody-may-read"
UNPICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def test_no_module_unpickles() -> None:
    """What a frame, a file or a socket holds can never become code."""
    found = []
    for path in (ROOT / "melld").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {str(node.module).split(".")[0]}
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "eval", "exec"):
                names = {"pickle"}
            else:
                continue
            found += [f"{path.name}:{node.lineno}" for name in names & UNPICKLERS]
    assert found == []


def test_the_unit_is_as_confined_as_documented() -> None:
    """A lost line of hardening shows here."""
    told = re.search(r"says \*\*([\d.]+) \(OK\)\*\*", (ROOT / "docs" / "security.md").read_text())
    assert told is not None
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = ROOT / "systemd" / "melld.service"
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    level = re.search(r"exposure level for melld\.service: ([\d.]+)", done.stdout)
    if level is None:
        pytest.skip(f"systemd-analyze cannot judge a file: {done.stderr[:200]}")
    assert float(level[1]) <= float(told[1])


def test_keys_and_texts_are_never_printed(demo_model: Path, tmp_path: Path) -> None:
    """A log can be handed to somebody who helps, whatever was answered, even at the most verbose level."""
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    bodies = [
        (CHAT, chat(messages=[{"role": "user", "content": TEXT}])),
        (CHAT, chat(messages=[{"role": "user", "content": TEXT}], n=TEXT)),
        (CHAT, chat(messages=TEXT)),
        (CHAT, chat(stop=TEXT, user=TEXT, **{TEXT: TEXT})),
        (CHAT, chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": TEXT}}})),
        ("/v1/completions", completion(prompt=TEXT)),
        ("/v1/messages", chat(messages=[{"role": TEXT, "content": TEXT}])),
        ("/v1/responses", {"model": "demo", "input": TEXT, "max_output_tokens": 2}),
        ("/tokenize", {"model": TEXT, "prompt": TEXT}),
    ]
    allowed = {"Authorization": f"Bearer {KEY}"}
    flags = ("--device", "cpu:1", "--kv-bytes", "16MiB", "--api-key-file", str(keys), "--log-level", "debug")
    with DaemonProcess(demo_model, *flags) as process:
        url = process.wait_ready().url
        statuses = {request(url, "POST", path, body, allowed).status for path, body in bodies}
        assert {200, 400, 404} <= statuses <= {200, 400, 404, 422}
        assert request(url, "POST", CHAT, chat(), {"Authorization": f"Bearer {KEY}x"}).status == 401
        assert request(url, "GET", f"/{TEXT}?{KEY}", None, allowed).status == 404
        assert request(url, "POST", CHAT, TEXT.encode(), allowed).status == 400
        with connect(url) as connection:  # and one that leaves in the middle of its stream
            streaming = chat(
                messages=[{"role": "user", "content": TEXT}], stream=True, max_tokens=2000, ignore_eos=True
            )
            connection.sendall(post(streaming).replace(b"a-key-for-tests", KEY.encode()))
            assert connection.recv(12) == b"HTTP/1.1 200"
        pages = [request(url, "GET", path, None, allowed).body.decode() for path in ("/metrics", "/status")]
        shown = process.melld("status", "--json").stdout
        process.stop()
        printed = "\n".join([*process.lines, *pages, shown])
    assert "DEBUG" in printed
    assert KEY not in printed
    assert TEXT.lower() not in printed.lower()


def test_a_key_is_not_shown_by_check_config(demo_model: Path, tmp_path: Path) -> None:
    """Its output can be shown to anybody."""
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    done = run_melld("check-config", "--quick", "--model", str(demo_model), "--api-key-file", str(keys))
    assert str(keys) in done.stdout
    assert KEY not in done.stdout + done.stderr
