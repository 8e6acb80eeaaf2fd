"""Workers on Ray nodes beside workers of this machine: `python -m benchmarks.cluster.cluster figures|chaos|moves`.

Two nodes on one machine, at two of its addresses: ratios travel, absolute figures do not.

    figures   one daemon with two local workers, one with a worker on each of two nodes, asked in turns
    chaos     a random history on four workers of two nodes: workers, agents, a node, the launcher die, a machine
              freezes, its cable is cut, the daemon is held up; every answer is held against an unharmed run
    moves     moves between the machines, by KV (NIXL over TCP) and by tokens in turns, by the length of the request,
              also over a link made slow; and which way the daemon takes by itself
"""

import argparse
import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.cluster.cluster_chaos import NIXL, SPREAD, chaos, flags_of
from melld.demo_model import make_demo_model
from tests.cluster.ray_nodes import HEAD, OTHER, RayNodes
from tests.migrate.chaos import pause_after
from tests.migrate.live import GREEDY, Operator, Stream
from tests.serve.daemon_process import DaemonProcess

CONTEXT_TOKENS = 32768
SLOW_LINK = "512KiB"
"""Per second."""
TOKENS = 400
BODY = GREEDY | {"max_tokens": TOKENS, "ignore_eos": True}


# -- figures ---------------------------------------------------------------------------------------------------------


def rates(daemon: DaemonProcess, streams: int) -> tuple[float, float]:
    """Return tokens per second of so many streams at once, and the median time between two chunks of one."""
    began_s = time.monotonic()
    running = [Stream(daemon, BODY) for _ in range(streams)]
    for stream in running:
        stream.result()
    took_s = time.monotonic() - began_s
    gaps = [later - earlier for one in running for earlier, later in itertools.pairwise(one.arrivals_s)]
    return streams * TOKENS / took_s, statistics.median(gaps)


def move_gap(daemon: DaemonProcess, *, is_far: bool) -> float:
    """Move a stream by its tokens to another worker, on the same or another machine; return the client's gap."""
    operator, stream = Operator(daemon), Stream(daemon, BODY)
    stream.wait_chunks(TOKENS // 4)
    status = operator.status()
    (request,) = status["requests"]
    machines = {worker["worker"]: worker["machine"] for worker in status["workers"]}
    home = machines[request["worker"]]
    there = [name for name, one in machines.items() if name != request["worker"] and (one != home) == is_far]
    report = operator.migrate(request["request"], there[0], "tokens")
    stream.result()
    return float(report["gap_s"])


def kill_gap(daemon: DaemonProcess, victim: Callable[[dict[str, Any]], int]) -> float:
    """Kill what `victim` names for a stream's worker (-9); return the longest pause from then."""
    operator, stream = Operator(daemon), Stream(daemon, BODY)
    stream.wait_chunks(TOKENS // 4)
    status = operator.status()
    worker = next(one for one in status["workers"] if one["worker"] == status["requests"][0]["worker"])
    pid = victim(worker)
    killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    stream.result()
    operator.wait_ready()
    return pause_after(killed_s, stream.arrivals_s)[0]


def figures(nodes: RayNodes, model: Path, asked: argparse.Namespace) -> int:
    """Measure in turns; print the ratios with their spread."""
    found: dict[str, list[float]] = {}
    with (
        DaemonProcess(model, "--device", "cpu:4", *SPREAD, genuine=True) as local,
        DaemonProcess(model, *flags_of(nodes), *SPREAD, genuine=True) as remote,
    ):
        for daemon in (local, remote):
            daemon.wait_ready()
            Operator(daemon).wait_ready()
        for number in range(asked.rounds):
            order = (local, remote) if number % 2 else (remote, local)
            for streams in (1, 32):
                seen = {daemon: rates(daemon, streams) for daemon in order}
                name = f"remote / local tokens/s, {streams} stream{'s' * (streams > 1)}"
                found.setdefault(name, []).append(seen[remote][0] / seen[local][0])
                if streams == 1:
                    name = "remote / local median time between tokens, 1 stream"
                    found.setdefault(name, []).append(seen[remote][1] / seen[local][1])
            gaps = {is_far: move_gap(remote, is_far=is_far) for is_far in (number % 2 == 0, number % 2 == 1)}
            found.setdefault("gap of a token move, other / same machine", []).append(gaps[True] / gaps[False])
            worker = kill_gap(remote, lambda one: int(one["pid"]))
            agent = kill_gap(remote, lambda one: nodes.of_node(one["machine"], "melld: agent"))
            found.setdefault("kill to next token, agent / worker", []).append(agent / worker)
            print(number, {name: round(values[-1], 3) for name, values in found.items()}, flush=True)
    rows = "".join(
        f"\n| {name} | {statistics.median(each):.2f} | {min(each):.2f} to {max(each):.2f} |"
        for name, each in found.items()
    )
    table = f"| what | median | least to most of {asked.rounds} |\n|---|---|---|{rows}"
    print(table)
    if asked.write:
        harness.record("cluster", table, "two CPU cores, two Ray nodes on them")
    return 0


# -- moves -----------------------------------------------------------------------------------------------------------


def far_move(daemon: DaemonProcess, tokens: int, via: str | None, salt: str) -> Any:
    """Move a stream with a prompt of so many tokens, which no cache holds, to the other machine; return the report.

    The stream goes on for longer than the move takes, which is paced so as to slow nobody down, and is left then.
    """
    prompt = [10 + number % 200 for number in range(tokens)]
    body = {"prompt": prompt, "max_tokens": CONTEXT_TOKENS - tokens, "temperature": 0, "ignore_eos": True}
    operator, stream = Operator(daemon), Stream(daemon, body | {"cache_salt": salt})
    stream.wait_chunks(10)
    (request,) = operator.requests_of(stream)
    report = operator.migrate(request["request"], "w1" if request["worker"] == "w0" else "w0", via)
    stream.leave()
    operator.wait_idle()
    assert report["outcome"] == "committed", report
    return report


def far_moves(daemon: DaemonProcess, tokens: int, rounds: int) -> str:
    """Move by KV and by tokens in turns, and once as the daemon chooses; return a row."""
    seen: dict[str, list[Any]] = {"kv": [], "tokens": []}
    for number in range(rounds):
        for via in ("kv", "tokens") if number % 2 else ("tokens", "kv"):
            seen[via].append(far_move(daemon, tokens, via, f"{tokens} {number} {via}"))
    cells = [f"{statistics.median(one['copied_bytes'] for one in seen['kv']) / 2**20:.1f}"]
    for key in ("total_s", "gap_s"):
        cells += [f"{statistics.median(one[key] for one in seen[via]) * 1e3:.0f}" for via in ("kv", "tokens")]
    chosen = [far_move(daemon, tokens, None, f"{tokens} {number}")["via"] for number in range(rounds)]
    cells.append(", ".join(f"{chosen.count(via)} by {via}" for via in ("kv", "tokens") if via in chosen))
    print(tokens, *cells, flush=True)
    return f"{tokens} | {' | '.join(cells)}"


def moves(nodes: RayNodes, model: Path, asked: argparse.Namespace) -> int:
    """Measure over a link that is as it is, and over a slow one, each with its own rate; print medians."""
    flags = (*flags_of(nodes), *NIXL, "--set", "cluster.devices_per_machine=1", *SPREAD)
    rows = ""
    for limit, lengths in ((None, (250, 1000, 2500)), (SLOW_LINK, (250, 1000))):
        limited = () if limit is None else ("--set", f'migration.link_bytes_per_s="{limit}"')
        with DaemonProcess(model, *flags, *limited, genuine=True) as daemon:
            daemon.wait_ready()
            Operator(daemon).wait_ready()
            for _ in range(2):
                daemon.wait_for(" by nixl")
            each = [link["bytes_per_s"] for link in daemon.status()["links"] if link["bytes_per_s"]]
            rate = f"{statistics.mean(each) / 2**20:.1f}" if each else "unknown"
            for tokens in lengths:
                rows += f"\n| {rate} | {far_moves(daemon, tokens, asked.rounds)} |"
    names = "tried MiB/s | prompt tokens | KV MiB | ms by KV | ms by tokens | gap ms by KV | gap ms by tokens | chosen"
    table = f"| {names} |\n|{'---|' * 8}{rows}"
    print(table)
    if asked.write:
        harness.record("cluster-moves", table, "two CPU cores, two Ray nodes on them")
    return 0


def main() -> int:
    """Start the nodes, measure, end them."""
    parser = harness.parser_of(__doc__)
    parser.add_argument("what", choices=["figures", "chaos", "moves"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin nothing after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--harm-every-s", type=float, default=5.0)
    parser.add_argument("--nixl", action="store_true", help="chaos: KV between the machines, too")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, RayNodes() as nodes:
        os.environ.update(nodes.environment)
        model = Path(directory) / "model"
        make_demo_model(model)
        for node in (HEAD, OTHER):
            nodes.start(node, devices=2)
        os.environ.setdefault("UCX_TLS", "tcp")  # not the ways between processes of one machine
        return {"figures": figures, "chaos": chaos, "moves": moves}[asked.what](nodes, model, asked)


if __name__ == "__main__":
    sys.exit(main())
