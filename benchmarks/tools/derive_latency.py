"""Makes melld/simulator/data/latency.csv from a `latency_table.csv.gz` of single iterations (see data/SOURCES.md).

    python -m benchmarks.tools.derive_latency ../shared/traces/latency_table.csv.gz > melld/simulator/data/latency.csv

Decode: for each batch size, a straight line through the times over the context tokens of the whole batch.
Prefill: a parabola through the times over the prompt's tokens.
"""

import collections
import csv
import gzip
import sys

import numpy as np

CARDS = {"A100-80GB": "a100-80g", "RTX4090-24GB": "rtx-4090"}


def main(path: str) -> None:
    """Print the derived table."""
    decode = collections.defaultdict(list)
    prefill = collections.defaultdict(list)
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            key = (row["model"], CARDS[row["gpu"]], row["basis"])
            if row["phase"] == "decode":
                batch = int(row["batch"])
                decode[*key, batch].append((batch * int(row["context_per_seq"]), float(row["time_ms"])))
            else:
                prefill[key].append((int(row["new_tokens"]), float(row["time_ms"])))
    print("model,card,basis,phase,batch,constant_ms,per_token_ms,per_token_squared_ms")
    for key, points in sorted(prefill.items()):
        tokens, times = np.array(points).T
        square, line, constant = np.polyfit(tokens, times, 2)
        print(*key, "prefill", 1, f"{constant:.5g}", f"{line:.5g}", f"{square:.5g}", sep=",")
    for (*key, batch), points in sorted(decode.items()):
        tokens, times = np.array(points).T
        line, constant = np.polyfit(tokens, times, 1)
        print(*key, "decode", batch, f"{constant:.5g}", f"{line:.5g}", 0, sep=",")


if __name__ == "__main__":
    main(sys.argv[1])
