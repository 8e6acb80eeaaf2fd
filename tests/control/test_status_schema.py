"""The documented schema of `melld status --json` is the one that is printed."""

import re
from pathlib import Path

import msgspec

from melld.control.status import DaemonStatus
from tests.cli.plausible import STATUS
from tests.control.schema_text import schema_text

DOCUMENT = Path(__file__).parents[2] / "docs" / "status-schema.md"
# What schema 1 promised when it was first released.  Scripts read these; the list only grows.
FIRST = {
    "": """schema melld_version vllm_version pid model state uptime_s url policy queued_requests warnings workers
        requests""",
    "workers": """worker device device_name state reason pid capacity_bytes used_bytes total_blocks used_blocks
        reserved_blocks running_requests waiting_requests max_requests tokens_per_s step_ms memory_bytes
        memory_total_bytes power_w temperature_c utilisation restarts""",
    "requests": "request worker phase prompt_tokens output_tokens kv_bytes blocks age_s moves",
}


def test_the_document_matches_the_structs() -> None:
    """An undocumented field fails here: `python -m tests.control.schema_text > docs/status-schema.md`."""
    assert DOCUMENT.read_text() == schema_text()


def test_every_transport_is_documented() -> None:
    """An alarm on links without a known `transport` is not triggered by one that works."""
    transports = (Path(__file__).parents[2] / "melld" / "migrate" / "transports").glob("*.py")
    names = {name for path in transports for name in re.findall(r'^NAME = "(\w+)"$', path.read_text(), re.MULTILINE)}
    told = re.search(r"^- `transport\?`: (.*?);", DOCUMENT.read_text(), re.MULTILINE)
    assert told is not None
    assert set(re.findall(r"`(\w+)`", told[1])) == names


def test_no_field_is_ever_removed() -> None:
    """A script written for schema 1 reads every later daemon of schema 1."""
    printed = msgspec.json.decode(msgspec.json.encode(STATUS))
    shapes = {"": printed, "workers": printed["workers"][0], "requests": printed["requests"][0]}
    assert {name: set(FIRST[name].split()) - set(shape) for name, shape in shapes.items()} == {
        "": set(),
        "workers": set(),
        "requests": set(),
    }


def test_a_status_with_unknown_fields_is_readable() -> None:
    """An older `melld status` shows what it knows of a newer daemon."""
    newer = {**msgspec.to_builtins(STATUS), "joules_saved": 12.5}
    newer["workers"] = [{**worker, "joules": 3.0} for worker in newer["workers"]]
    assert msgspec.json.decode(msgspec.json.encode(newer), type=DaemonStatus) == STATUS
