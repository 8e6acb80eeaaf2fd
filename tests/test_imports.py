"""The order of melld's modules: each imports only from its own line of the table and from lines above it.

P = pure: takes facts, returns decisions; no I/O, clock, environment, logging, asyncio.
W = a worker's process, or a judge's: torch and vLLM may be imported.
D = the daemon's process and the command line: asyncio, and no torch: importing it never costs seconds or memory.
V = the daemon's process where vLLM's input and output processors and its serving classes run: they bring torch along,
    without a CUDA context.
R = Ray's processes, and the daemon's child that speaks with Ray.
"""

import ast
import fnmatch
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

TABLE = """
P  errors  ids  nearest  nested  printable  config_values  config_reading  config_server  config  config_text
P  kvstore.geometry  kvstore.kept  kvstore.ledger*  kvstore.device_reading  kvstore.capacity  kvstore.prefixes
P  scheduler.*
P  engine.fleet.life
P  landlord.*
P  decisions.*
P  migrate.*
P  control.messages  control.status  daemon.renewal.handover
P  simulator.*
P  engine.wire.*  engine.answer_formats
P  engine.frontend.schema  engine.frontend.judge_queue  engine.frontend.moulds
W  migrate.transports.*
W  engine.arena_file  engine.image_library  engine.gpu_memory  engine.pin  engine.vllm_options  engine.model_files
W  engine.hub
W  engine.arguments
W  engine.layers
W  engine.worker.*
W  engine.preload
D  decisions.file
D  log_lines  output  tasks  demo_model  kvstore.*  control.*  daemon.systemd
D  daemon.renewal.channel  daemon.renewal.stand_in
D  engine.host.*
P  cluster.envelopes
R  cluster.head  cluster.actor  cluster.launcher
D  cluster.*
D  engine.fleet.*
D  engine.frontend.*
V  engine.frontend.tokens.*
V  engine.frontend.prompt_logprobs  engine.frontend.masks  engine.frontend.step_logger
V  engine.frontend.vllm_metrics
V  engine.frontend.fleet_client  engine.frontend.frontend
V  engine.frontend.prepared  engine.frontend.rehearsal
D  driver.*
V  api.*
V  daemon.*
D  cli  cli.*  __main__
"""

IMPURE_TEXT = """
aiohttp asyncio logging multiprocessing os psutil pynvml selectors signal socket subprocess threading time torch
transformers vllm zmq
"""
IMPURE = frozenset(IMPURE_TEXT.split())
HEAVY = frozenset({"torch", "transformers", "vllm", "ray", "cryptography", "grpc"})
"""Slow to load, or of an extra that the core does without."""


class Import(NamedTuple):
    """One import statement's target."""

    target: str
    line: int
    at_load: bool
    """Runs when the module is loaded: not inside a function, not for the type checker alone."""


class Row(NamedTuple):
    """One line of the table."""

    number: int
    kind: str
    pattern: str


ROWS = [
    Row(number, line.split()[0], pattern)
    for number, line in enumerate(TABLE.strip().splitlines())
    for pattern in line.split()[1:]
]


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT / "melld").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules() -> dict[str, Path]:
    """Return every module of melld by its dotted name within it; packages only if their __init__ imports something."""
    found = {_module_name(path): path for path in sorted((ROOT / "melld").rglob("*.py"))}
    return {name: path for name, path in found.items() if path.name != "__init__.py" or imports_of(path)}


def row_of(name: str) -> Row | None:
    """Return the module's line: of the patterns that fit it, the longest."""
    fitting = [row for row in ROWS if fnmatch.fnmatchcase(name, row.pattern)]
    return max(fitting, key=lambda row: len(row.pattern), default=None)


@functools.cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """Return every import in the file, wherever it stands."""
    return tuple(_walk(ast.parse(path.read_text(), str(path)), at_load=True))


def _walk(node: ast.AST, at_load: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, at_load) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "melld imports by full names"
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            is_module = node.module == "melld" or (ROOT / (whole.replace(".", "/") + ".py")).exists()
            yield Import(whole if is_module else str(node.module), node.lineno, at_load)
    lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
        isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    )
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, at_load and not lazy)


def _loads_heavy(name: str) -> list[str]:
    """Return the import chain by which `name` loads torch or vLLM; empty if it does not."""
    chains = {name: [name]}
    waiting = [name]
    while waiting:
        module = waiting.pop()
        for found in imports_of(modules()[module]):
            if found.at_load and found.target.split(".")[0] in HEAVY:
                return [*chains[module], found.target]
            inner = found.target.removeprefix("melld.")
            known = found.target.startswith("melld.") and inner in modules() and inner not in chains
            if found.at_load and known and not _brings_vllm(inner):
                chains[inner] = [*chains[module], inner]
                waiting.append(inner)
    return []


def _brings_vllm(name: str) -> bool:
    row = row_of(name)
    return row is not None and row.kind == "V"


def rooms(kinds: str) -> list[tuple[str, ...]]:
    """Return the modules of these kinds, by their folder."""
    found: dict[Path, list[str]] = {}
    for name, path in modules().items():
        if (row := row_of(name)) and row.kind in kinds:
            found.setdefault(path.parent, []).append(name)
    return [tuple(room) for room in found.values()]


def room_name(room: tuple[str, ...]) -> str:
    return modules()[room[0]].parent.name


def test_every_module_has_its_place() -> None:
    """A new module is put in the table on purpose, which is when its neighbours are chosen."""
    assert [name for name in modules() if row_of(name) is None] == []


def test_folders_and_modules_stay_small() -> None:
    """At most 20 files in a folder, and 300 lines in a file."""
    crowded = [folder for folder in {path.parent for path in modules().values()} if len(list(folder.glob("*.py"))) > 20]
    assert crowded == []
    assert [name for name, path in modules().items() if len(path.read_text().splitlines()) > 300] == []


@pytest.mark.parametrize("room", rooms("PWDVR"), ids=room_name)
def test_a_module_imports_only_from_its_line_and_above(room: tuple[str, ...]) -> None:
    """What decides never depends on what acts, so it can be tested, simulated and replayed alone."""
    wrong = []
    for name in room:
        row = row_of(name)
        assert row is not None
        for found in imports_of(modules()[name]):
            inner = found.target.removeprefix("melld.")
            target = row_of(inner) if found.target.startswith("melld.") and inner in modules() else None
            if target is not None and target.number > row.number:
                wrong.append(f"{name}, line {found.line}: {inner}")
    assert wrong == []


@pytest.mark.parametrize("room", rooms("P"), ids=room_name)
def test_a_pure_module_imports_nothing_that_acts(room: tuple[str, ...]) -> None:
    """Pure code cannot read a clock or block by accident: it cannot even name one."""
    found = {(name, item.target.split(".")[0]) for name in room for item in imports_of(modules()[name])}
    assert sorted((name, target) for name, target in found if target in IMPURE) == []


@pytest.mark.parametrize("room", rooms("D"), ids=room_name)
def test_a_daemon_module_loads_neither_torch_nor_ray(room: tuple[str, ...]) -> None:
    """`melld status` answers at once, and the daemon's process stays small where it needs no model code, nor Ray."""
    assert {name: chain for name in room if (chain := _loads_heavy(name))} == {}


def test_the_interpreter_confirms_what_the_source_says() -> None:
    """The same promise held by a real interpreter: a third-party package could bring torch along, too."""
    light = [f"melld.{name}" for name in modules() if (row := row_of(name)) and row.kind in "PD" and name != "__main__"]
    code = f"import sys, {', '.join(light)}\nprint(sorted({set(HEAVY)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
