"""What a live migration costs: the client's gap, and the copy's rate.

Parts, each by itself (`--parts`), everything through the HTTP API but `copy`:

    kv          the gap of live moves by KV, beside stop-and-copy and re-prefill, by length
    tokens      the gap of live moves by tokens, beside a re-prefill, by length; requests that decode on both workers
    copy        the rate of a pull of many blocks, beside one large copy over the same mapping
    states      the gap of live moves of a hybrid model's requests, beside a plain model's with as many bytes, by length

The machine may be busy with other things: what is compared is measured in turns, move by move, window by window.

    gap   the longest time between two chunks around a move, less the median of that stream, as the client sees it
    idle  the same of a window of the same length in which nothing moved
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness import SETTINGS, markdown, paced_environment, parser_of, record, rows_in_markdown
from benchmarks.moves.migration_copy import copy_rates
from benchmarks.moves.migration_parts import Served, gaps_by_kv, gaps_by_tokens, moved_bytes
from tests.families.every import FAMILIES
from tests.families.family import make_family

BASELINE = """
import melld.migrate.migration as m, melld.migrate.table as t
m.MAX_ROUNDS = 0
t.TRANSITIONS[t.MoveState.LOOKING, t.Sign.BY_TOKENS] = t.MoveState.RESERVING
"""
"""The lifecycle of a daemon without what makes a move live: no copy, and nothing computed, ahead of the freeze."""
TABLES = {"copy": "copy", "kv": "client-gap", "tokens": "gap-by-tokens", "states": "state-gaps"}
WAYS = {"live": ("", "kv"), "stop-and-copy": (BASELINE, "kv"), "re-prefill": (BASELINE, "tokens")}
"""Of the part kv: what the daemon is made to be, and how a request moves."""
NO_CACHE = ("--set", "model.vllm.enable_prefix_caching=false")
"""So that a request can be moved there and back, again and again, and every block is copied, or computed, each time."""
STEP_S = 0.02
"""Of both models of the part states: the gap less the step is what the move adds."""
HYBRID, PLAIN = FAMILIES["granite4_h"], FAMILIES["llama3"]
"""With one layer of attention each: a token takes as many bytes, so that they stay alike as the answers grow."""


def measure(part: str, model: Path, directory: Path, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Return the rows of one part."""
    with ExitStack() as stack:

        def served(name: str, *flags: str, change: str = "", model: Path = model) -> Served:
            return stack.enter_context(Served(setting, model, directory / f"{part}-{name}", change, flags))

        setting = SETTINGS[asked.device]
        if part == "copy":
            yield from copy_rates(setting.kind, asked.repeats)
        elif part == "kv":
            changes = {WAYS[way][0]: way for way in asked.ways}
            daemons = {change: served(way, *NO_CACHE, change=change) for change, way in changes.items()}
            ways = {way: (daemons[WAYS[way][0]], WAYS[way][1]) for way in asked.ways}
            for tokens in asked.lengths:
                yield from gaps_by_kv(ways, dict.fromkeys(ways, tokens), asked.repeats)
        elif part == "states":
            os.environ |= paced_environment(directory / "paced", STEP_S, 0.0, 0.0)
            for state in asked.states:
                models = {"hybrid": directory / f"hybrid-{state}", "plain": directory / f"plain-{state}"}
                make_family(HYBRID._replace(fields={**HYBRID.fields, "mamba_d_state": state}), models["hybrid"])
                make_family(PLAIN._replace(fields={**PLAIN.fields, "num_hidden_layers": 1}), models["plain"])
                ways = {way: (served(f"{way}-{state}", *NO_CACHE, model=made), "kv") for way, made in models.items()}
                for tokens in asked.lengths:
                    hybrid_bytes, plain_bytes = (moved_bytes(daemon, tokens) for daemon, _ in ways.values())
                    alike = {"hybrid": tokens, "plain": round(tokens * hybrid_bytes / plain_bytes)}
                    yield from gaps_by_kv(ways, alike, asked.repeats)
        else:
            live, baseline = served("live"), served("baseline", change=BASELINE)
            for tokens in asked.lengths:
                yield from gaps_by_tokens({"live": live, "re-prefill": baseline}, tokens, asked.repeats)


def main() -> int:
    """Measure, and print a row at a time, as JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=list(SETTINGS), default="cpu")
    parser.add_argument("--parts", nargs="+", choices=list(TABLES), default=["copy", "kv", "tokens"])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="of the part kv")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096, 16384])
    parser.add_argument("--states", type=int, nargs="+", default=[16, 128], help="of the part states: numbers a head")
    parser.add_argument("--repeats", type=int, default=7)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        SETTINGS[asked.device].make_model(model)
        for part in asked.parts:
            rows = []
            for row in measure(part, model, Path(directory), asked):
                rows.append(row)
                at = time.strftime("%H:%M:%S")
                print(json.dumps({"part": part, **row, "load": round(os.getloadavg()[0], 1), "at": at}), flush=True)
            if asked.write:
                name, machine = (
                    (f"gpu-{TABLES[part]}", "one GPU") if asked.device == "cuda" else (TABLES[part], "2-core VM")
                )
                record(name.replace("gpu-client-gap", "gpu-gap"), table_of(part, rows), machine)
    return 0


def table_of(part: str, rows: list[dict[str, Any]]) -> str:
    """Lay out a part's rows: the gaps by KV of all passes over the lengths together, of other parts all figures."""
    if part != "kv":
        plain = [{key: value for key, value in row.items() if not isinstance(value, list)} for row in rows]
        return rows_in_markdown(plain)
    cells = []
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        mine = [row for row in rows if row["tokens"] == tokens]
        gaps_ms = [gap_ms for row in mine for gap_ms in row["gaps_ms"]]
        low, middle, high = statistics.quantiles(gaps_ms, n=4)
        gap = f"{middle:.1f} ms ({low:.1f} to {high:.1f}; {max(gaps_ms):.0f})"
        medians = [statistics.median(row[key] or 0.0 for row in mine) for key in ("step_ms", "idle_ms", "mib")]
        cells.append([f"{tokens:,}", f"{medians[0]:.1f} ms", gap, f"{medians[1]:.1f} ms", f"{medians[2]} MiB"])
    gap = f"gap: median of {len(gaps_ms)} (middle half; longest)"
    return markdown(["prompt tokens", "decode step", gap, "nothing moved", "copied"], cells)


if __name__ == "__main__":
    sys.exit(main())
