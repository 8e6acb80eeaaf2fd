"""Change the pure core one small step at a time, and list the changes that no test notices.

`make mutants` runs this with mutmut, module by module: while one is changed, all others run at full speed.  It prints
how many changes of each module the tests beside it noticed, and writes the others to build/mutants/alive.diff;
tests/mutants.md says which of those are worth nothing.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "mutants"
ALIVE = WORK / "alive.diff"
EVERY_POLICY = "tests/scheduler/policies/test_every_policy.py"
PURE = {
    "melld/scheduler": ("tests/scheduler/test_*.py", EVERY_POLICY),
    "melld/scheduler/policies": ("tests/scheduler/policies/test_*.py",),
    "melld/scheduler/policies/plus": ("tests/scheduler/policies/plus",),
    "melld/scheduler/policies/slo": ("tests/scheduler/policies/slo/test_{name}*.py",),
    "melld/landlord": ("tests/landlord/test_*.py",),
    "melld/migrate": ("tests/migrate/test_{name}*.py",),
    "melld/kvstore": ("tests/kvstore/test_{name}.py",),
    "melld/api": ("tests/api/test_{name}.py",),
    "melld/engine/fleet": ("tests/engine/fleet/test_{name}.py",),
    "melld/daemon": ("tests/daemon/test_{name}.py",),
}
"""Folders of pure modules, and the tests that are to notice what changes in one of them."""
CHOSEN = {
    "melld/migrate": "boundaries migration packing pacing paths planner table topology waits",
    "melld/kvstore": "capacity geometry ledger prefixes",
    "melld/api": "admission keys reach",
    "melld/engine/fleet": "fate place probation reports",
    "melld/daemon": "attainment",
}
"""Of folders that are not pure altogether: the modules that are."""
MORE_TESTS = {
    "melld/migrate/table.py": ("tests/migrate/test_migration.py",),
    "melld/migrate/paths.py": ("tests/migrate/test_topology.py", "tests/migrate/test_planner*.py"),
    "melld/migrate/boundaries.py": ("tests/migrate/test_paths.py",),
    "melld/engine/fleet/probation.py": ("tests/engine/fleet/test_who_runs_what.py",),
    "melld/engine/fleet/reports.py": ("tests/engine/fleet/test_order.py",),
    "melld/scheduler/policies/slo/policy.py": ("tests/scheduler/policies/slo/test_prefixes.py",),
    "melld/scheduler/policies/slo/dispatch.py": ("tests/scheduler/policies/slo/test_prefixes.py",),
    "melld/api/keys.py": ("tests/api/test_admission.py",),
}
NOT_BEHAVIOUR = [r"\braise \w", r"\blog\.\w", r"\bassert\b", r"\bmessage = ", r'^\s*f?"[^"]* [^"]*",?$']
"""Lines that mutmut leaves alone: errors, log lines and assertions say words, and their wording is not tested."""
NOTICED = {1, 3, 24, 36, 152, 255, -24}
"""The exit statuses of mutmut's workers after a failed test, or after tests that would not end."""

NO_TEST, NOBODY_LOOKS = "could not find any test case for any mutant", 33
"""What mutmut says, and the status that it gives, where no test comes by."""


def modules(asked: list[str]) -> list[str]:
    """Return the modules to change, all of them where nobody asks for some."""
    pure = [path for folder in PURE for path in sorted((ROOT / folder).glob("*.py")) if is_pure(folder, path)]
    names = [str(path.relative_to(ROOT)) for path in pure]
    return [name for name in names if not asked or any(name.startswith(prefix) for prefix in asked)]


def is_pure(folder: str, path: Path) -> bool:
    """Return True if this module decides something, and only decides."""
    chosen = CHOSEN.get(folder)
    return path.name not in ("__init__.py", "law.py") and (chosen is None or path.stem in chosen.split())


def tests_of(module: str) -> list[str]:
    """Return the files of tests that are to notice what changes in a module."""
    path = Path(module)
    patterns = [pattern.format(name=path.stem) for pattern in PURE[str(path.parent)]]
    found = [file for pattern in (*patterns, *MORE_TESTS.get(module, ())) for file in sorted(ROOT.glob(pattern))]
    return list(dict.fromkeys(str(file.relative_to(ROOT)) for file in found))


def lay_out(module: str) -> Path:
    """Copy what the tests need to a folder of its own, with mutmut's settings for this module."""
    folder = WORK / module.removesuffix(".py").replace("/", ".")
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("melld", "tests", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    settings = {
        "source_paths": ["melld"],
        "only_mutate": [module],
        "also_copy": ["docs"],
        "do_not_mutate_patterns": NOT_BEHAVIOUR,
        "pytest_add_cli_args": ["--hypothesis-profile=mutants", "-p", "no:cacheprovider"],
        "pytest_add_cli_args_test_selection": tests_of(module),
        "timeout_constant": 2.0,
        "timeout_multiplier": 3.0,
        "use_git_change_detection": False,
    }
    table = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    (folder / "pyproject.toml").write_text(f"{(ROOT / 'pyproject.toml').read_text()}\n[tool.mutmut]\n{table}")
    return folder


def mutmut(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run mutmut in a folder, in one process."""
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    command = [str(Path(sys.executable).parent / "mutmut"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def change(module: str, sample: int) -> tuple[dict[str, int], Path]:
    """Return what mutmut's worker said to each change of a module: of all of them, or of a random sample."""
    folder = lay_out(module)
    record = folder / "mutants" / f"{module}.meta"
    chosen = []
    if sample:
        mutmut(folder, "run", "--max-children", "1", "only to make them")
        names = [*json.loads(record.read_text())["exit_code_by_key"]]
        chosen = random.Random(module).sample(names, min(sample, len(names)))
    finished = mutmut(folder, "run", "--max-children", "1", *chosen)
    statuses = json.loads(record.read_text())["exit_code_by_key"]
    if finished.returncode and NO_TEST in finished.stdout:  # also where there is nothing to change
        return dict.fromkeys(chosen or statuses, NOBODY_LOOKS), folder
    if finished.returncode:
        raise SystemExit(f"{module}: mutmut stopped with status {finished.returncode}:\n{finished.stdout[-3000:]}")
    return {name: status for name, status in statuses.items() if status is not None}, folder


def main() -> None:
    """Print the table; the changes that nobody missed go to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("module", nargs="*", help="melld/scheduler/waiting.py, or a folder; by default the pure core")
    parser.add_argument("--sample", type=int, default=0, help="so many random changes of each module, not all")
    arguments = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    with ALIVE.open("w") as alive:
        print(f"{'module':<44} {'changes':>7} {'noticed':>7} {'share':>6}", flush=True)
        for module in modules(arguments.module):
            statuses, folder = change(module, arguments.sample)
            if not statuses:  # data: mutmut changes functions alone
                continue
            missed = [name for name, status in statuses.items() if status not in NOTICED]
            noticed = len(statuses) - len(missed)
            print(f"{module:<44} {len(statuses):>7} {noticed:>7} {noticed / max(1, len(statuses)):>6.0%}", flush=True)
            alive.writelines(mutmut(folder, "show", name).stdout for name in missed)
            alive.flush()
    print(f"what nobody missed: {ALIVE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
