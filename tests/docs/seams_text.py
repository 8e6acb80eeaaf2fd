"""Write the table of docs/architecture.md: each seam into vLLM and other packages."""

from pathlib import Path

from tests.contracts.seams import SEAMS

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
BEGIN, END = "<!-- seams -->\n", "<!-- end of seams -->\n"


def seams_text() -> str:
    """Return the table, between its markers."""
    rows = ["| what | how | why | where | since | test | upstream could take |", "|---|---|---|---|---|---|---|"]
    for seam in SEAMS:
        where = ", ".join(f"`{module}`" for module in seam.ours)
        test = f"`{seam.test.rpartition('/')[2]}`"
        rows.append(f"| {seam.what} | {seam.how} | {seam.why} | {where} | {seam.since} | {test} | {seam.upstream} |")
    return "\n".join([BEGIN, *rows, "", END])


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + seams_text() + rest.partition(END)[2])
