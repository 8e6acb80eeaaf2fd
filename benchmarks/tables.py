"""Keep each measured table as JSON, and lay out those that docs/benchmarks.md shows.

    python benchmarks/tables.py       # write the page's tables from benchmarks/results/*.json

A benchmark with `--write` records its tables here.  The page names one by `<!-- NAME: PREFIX | 1 3 -->`: the rows that
begin with PREFIX (default: all), of these columns (default: all).  What follows up to `<!-- end -->` is written anew.
"""

import datetime
import json
import pathlib
import re
import shlex
import sys
from typing import TypedDict

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
PLACE = re.compile(r"<!-- ([\w-]+)(?:: ([^|\n]+?))?(?: \| ([\d ]+))? -->\n.*?<!-- end -->", re.DOTALL)


class Table(TypedDict):
    """One table, and how to make it again."""

    command: str
    date: str
    machine: str
    columns: list[str]
    rows: list[list[str]]


def record(folder: pathlib.Path, name: str, markdown: str, machine: str = "simulated") -> None:
    """Save a table in Markdown, with the command that is running."""
    columns, _, *rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in markdown.splitlines()]
    command = f"python benchmarks/{shlex.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]])}"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    table = Table(command=command, date=today, machine=machine, columns=columns, rows=rows)
    save(folder, name.removeprefix("table:"), table)


def save(folder: pathlib.Path, name: str, table: Table) -> None:
    """Write one file, a row a line."""
    folder.mkdir(parents=True, exist_ok=True)
    heads = [f" {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}," for k, v in table.items() if k != "rows"]
    rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in table["rows"])
    text = "\n".join(["{", *heads, ' "rows": [', rows, " ]", "}", ""])
    (folder / f"{name}.json").write_text(text, encoding="utf-8")


def load(name: str) -> Table:
    """Read one table."""
    table: Table = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return table


def laid_out(name: str, prefix: str, numbers: str) -> str:
    """Return the chosen rows and columns in Markdown, and under them where the rest and the command are."""
    table = load(name)
    chosen = [int(number) - 1 for number in numbers.split()] or range(len(table["columns"]))
    rows = [table["columns"], *(row for row in table["rows"] if row[0].startswith(prefix))]
    lines = [f"| {' | '.join(row[column] for column in chosen)} |" for row in rows]
    lines.insert(1, "|---" * len(chosen) + "|")
    return "\n".join([*lines, "", f"`{name}.json`, {table['date']}, {table['machine']}."])


def page_text(page: str) -> str:
    """Return the page with each of its tables written anew."""
    return PLACE.sub(
        lambda place: f"{place[0].splitlines()[0]}\n{laid_out(place[1], place[2] or '', place[3] or '')}\n<!-- end -->",
        page,
    )


if __name__ == "__main__":
    PAGE.write_text(page_text(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
