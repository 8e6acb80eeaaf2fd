"""Writes the last section of docs/api.md: the options of `vllm serve` that melld refuses, by reason."""

from itertools import groupby
from pathlib import Path

from melld.engine.vllm_options import ENGINE_OPTIONS, FRONTEND_OPTIONS, REFUSED_OPTIONS

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
HEADING = "## Options of `vllm serve`\n"


def options_text() -> str:
    """Return the section, as it stands in the page."""
    served = len(ENGINE_OPTIONS | FRONTEND_OPTIONS)
    lines = [
        HEADING,
        f"{served} of them go to vLLM from `[model.vllm]`, spelt with `_` or `-`; the others are refused.",
    ]
    lines += [""]
    for reason, entries in groupby(REFUSED_OPTIONS.items(), key=lambda entry: entry[1]):
        names = [f"`{name}`" for name, _ in entries if not name.startswith("_")]
        lines += [f"- {', '.join(names)}: {reason}"] if names else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(f"{PAGE.read_text().partition(HEADING)[0].rstrip()}\n\n{options_text()}")
