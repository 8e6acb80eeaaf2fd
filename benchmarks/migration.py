"""What a live migration costs: the client's gap, the copy's rate, the neighbours' pace; `PYTHONPATH=. python FILE`.

Parts, each by itself (`--parts`), everything through the HTTP API but `copy`:

    kv          the gap of live moves by KV, beside stop-and-copy and re-prefill, by length
    tokens      the gap of live moves by tokens, beside a re-prefill, by length; requests that decode on both workers
    neighbours  how others on the two workers fare with one move a second, beside none
    copy        the rate of a pull of many blocks, beside one large copy over the same mapping
    states      the gap of live moves of a hybrid model's requests, beside a plain model's with as many bytes, by length

The machine may be busy with other things: what is compared is measured in turns, move by move, window by window.

    gap   the longest time between two chunks around a move, less the median of that stream, as the client sees it
    idle  the same of a window of the same length in which nothing moved
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.migration_copy import copy_rates
from benchmarks.migration_parts import Served, gaps_by_kv, gaps_by_tokens, moved_bytes, neighbours
from benchmarks.paced import paced_environment
from benchmarks.setting import SETTINGS
from tests.families.every import FAMILIES
from tests.families.family import make_family

BASELINE = """
import melld.migrate.migration as m, melld.migrate.table as t
m.MAX_ROUNDS = 0
t.TRANSITIONS[t.MoveState.LOOKING, t.Sign.BY_TOKENS] = t.MoveState.RESERVING
"""
"""The lifecycle of a daemon without what makes a move live: no copy, and nothing computed, ahead of the freeze."""
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
        elif part == "tokens":
            live, baseline = served("live"), served("baseline", change=BASELINE)
            for tokens in asked.lengths:
                yield from gaps_by_tokens({"live": live, "re-prefill": baseline}, tokens, asked.repeats)
        else:
            yield from neighbours(served("live", *NO_CACHE), asked.seconds, asked.repeats)


def main() -> int:
    """Measure, and print a row at a time, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(SETTINGS), default="cpu")
    parser.add_argument("--parts", nargs="+", default=["copy", "kv", "tokens", "neighbours"])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="of the part kv")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096, 16384])
    parser.add_argument("--states", type=int, nargs="+", default=[16, 128], help="of the part states: numbers a head")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each window of `neighbours`, odd")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        SETTINGS[asked.device].make_model(model)
        for part in asked.parts:
            for row in measure(part, model, Path(directory), asked):
                at = time.strftime("%H:%M:%S")
                print(json.dumps({"part": part, **row, "load": round(os.getloadavg()[0], 1), "at": at}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
