"""Write the last section of docs/api.md: the options of `vllm serve` that melld refuses, by reason."""

from collections.abc import Sequence
from itertools import accumulate, groupby
from pathlib import Path

from melld.engine.vllm_options import REFUSED_OPTIONS, served_options

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
HEADING = "## Options of `vllm serve`\n"
KNOWN = served_options() | REFUSED_OPTIONS.keys()


def options_text() -> str:
    """Return the section, as it stands in the page."""
    served = len(served_options())
    lines = [
        HEADING,
        f"{served} of them are passed to vLLM from `[model.vllm]`, spelled with `_` or `-`. The others are rejected:",
    ]
    lines += [""]
    for reason, entries in groupby(REFUSED_OPTIONS.items(), key=lambda entry: entry[1]):
        names = [f"`{name}`" for name in families([name for name, _ in entries if not name.startswith("_")])]
        lines += [f"- {', '.join(names)}: {reason}"] if names else []
    return "\n".join(lines) + "\n"


def families(names: Sequence[str]) -> list[str]:
    """Return the names, with `x_*` in place of three or more where every option with that prefix is included."""
    return list(dict.fromkeys(_family(name, names) for name in names))


def _family(name: str, names: Sequence[str]) -> str:
    beginnings = list(accumulate(f"{word}_" for word in name.split("_")[:-1]))
    those = [[known for known in KNOWN if known.startswith(beginning)] for beginning in beginnings]
    whole = [one for one in those if len(one) > 2 and set(one) <= set(names)]
    return f"{beginnings[max(i for i, one in enumerate(those) if one == whole[0])]}*" if whole else name


if __name__ == "__main__":
    PAGE.write_text(f"{PAGE.read_text().partition(HEADING)[0].rstrip()}\n\n{options_text()}")
