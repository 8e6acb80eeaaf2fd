"""Measure a question anew and rewrite its tables: `make bench WHAT=serving`, or WHAT=step-budget for one table.

Each table in benchmarks/results has the command that made it.  A question is a folder of benchmarks.  Without WHAT, the
questions and their tables are listed.
"""

import shlex
import subprocess
import sys
from collections import defaultdict

from benchmarks.harness import RESULTS, ROOT, load


def tables_by_question() -> dict[str, dict[str, str]]:
    """Return each question's tables with their commands."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path in sorted(RESULTS.glob("*.json")):
        command = load(path.stem)["command"]
        question = next(word for word in shlex.split(command) if word.startswith("benchmarks.")).split(".")[1]
        found[question][path.stem] = command
    return found


def main() -> int:
    """Run the commands of a question, each once; return 1 if one of them failed."""
    questions = tables_by_question()
    tables = {name: command for found in questions.values() for name, command in found.items()}
    if len(sys.argv) != 2 or sys.argv[1] not in questions | tables:
        for question, found in sorted(questions.items()):
            print(f"{question}: {', '.join(found)}")
        return 2
    wanted = sys.argv[1]
    failed = []
    for command in dict.fromkeys(questions.get(wanted, {wanted: tables.get(wanted, "")}).values()):
        words = shlex.split(command)
        print(command, flush=True)
        done = subprocess.run(
            [sys.executable, *words[1:], *["--write"] * ("--write" not in words)], cwd=ROOT, check=False
        )
        failed += [command] * (done.returncode != 0)
    print(*(f"failed: {command}" for command in failed), sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
