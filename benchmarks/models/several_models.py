"""Three models on CPU devices: `python -m benchmarks.models.several_models history` (or another).

`history`: on two devices that hold three and a bit, clients ask all three while workers are killed (-9) at random and
while they give back memory.  Every greedy and seeded answer must be the one of a quiet run, every byte accounted for
afterwards, and memory flat.  `dozing`: the same of models with larger weights, which doze when idle.
`switches`: the third of three models is asked, of which two fit, again and again, half of the time beside a stream of
another model; its first token against one of a model loaded beside nobody.
`reloads`: a model that is added by a reload beside a stream of another; its first token against a bare load.
`wakes`: the first token of a model that dozes, against one that is loaded; with `--device cuda` of one of a usual size.
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks import harness
from benchmarks.harness import CUDA, toml
from benchmarks.models.models_history import NAMES, cases, history, make_models
from melld.demo_model import make_demo_model
from tests.migrate.live import Operator, Stream
from tests.serve.daemon_process import DaemonProcess

Outcome = tuple[dict[str, Any], list[str]]
"""What happened, and what should not have."""


def switches(daemon: DaemonProcess, asked: argparse.Namespace) -> Outcome:
    """Ask a model that is not loaded, again and again; return the times, and what was cut or altered."""
    operator, body = Operator(daemon), cases()[0]
    quiet = {name: Stream(daemon, body | {"model": name}).result() for name in NAMES}
    long = {**body, "max_tokens": 1500}
    wrong: list[str] = []

    def states() -> dict[str, str]:
        return {one["model"]: one["state"] for one in operator.status()["served"]}

    def first_token_s(name: str) -> float:
        began_s = time.monotonic()
        stream = Stream(daemon, body | {"model": name})
        if stream.result().choices != quiet[name].choices:
            wrong.append(f"{name} answered otherwise: {stream.answer}")
        return stream.arrivals_s[0] - began_s

    bare_s: list[float] = []
    for number in range(asked.switches):
        for name in NAMES:
            if states()[name] != "unloaded":
                operator.unload(name)
        bare_s.append(first_token_s(NAMES[number % len(NAMES)]))
    switched_s: list[float] = []
    beside: dict[int, Stream] = {}
    for number in range(asked.switches):
        loaded = [name for name, state in states().items() if state == "loaded"]
        for name in NAMES:
            if len(loaded) < 2 and name not in loaded:
                daemon.melld("load", name)
                loaded.append(name)
        time.sleep(asked.pause_s)  # a person reads
        if number % 2:
            beside[number] = Stream(daemon, long | {"model": loaded[0]})
            beside[number].wait_chunks(1)
        (absent,) = [name for name in NAMES if name not in loaded]
        switched_s.append(first_token_s(absent))
        if number % 2 and (answer := beside[number].result()).error is not None:
            wrong.append(f"a stream was cut: {answer.error}")
        if number % 2 and beside[number].answer.usage["completion_tokens"] != long["max_tokens"]:
            wrong.append("a stream was cut short")
    happened = {
        "bare_s": [round(one, 3) for one in bare_s],
        "switched_s": [round(one, 3) for one in switched_s],
        "medians_s": [round(statistics.median(bare_s), 3), round(statistics.median(switched_s), 3)],
    }
    return happened, wrong


def tenants(status: Any) -> dict[str, str]:
    """Return each model's state on the first device."""
    return {one["model"]: one["state"] for one in status["devices"][0]["models"]}


def wakes(daemon: DaemonProcess, asked: argparse.Namespace) -> Outcome:
    """Ask a model that is not loaded, and one that dozes; return the times."""
    operator, body = Operator(daemon), cases()[0] | {"model": NAMES[0]}
    quiet = Stream(daemon, body).result()
    times_s: dict[str, list[float]] = {"unloaded": [], "dozing": []}
    wrong: list[str] = []
    for number in range(2 * asked.switches):
        way = ("unloaded", "dozing")[number % 2]
        if way == "unloaded":
            operator.unload(NAMES[0])
        else:
            operator.wait(lambda status: tenants(status)[NAMES[0]] == "dozing", 60.0)
        began_s = time.monotonic()
        stream = Stream(daemon, body)
        if stream.result().choices != quiet.choices:
            wrong.append(f"{way}: {stream.answer}")
        times_s[way].append(stream.arrivals_s[0] - began_s)
        print(way, times_s[way][-1], flush=True)
    happened: dict[str, Any] = {f"{way}_s": [round(one, 3) for one in found] for way, found in times_s.items()}
    return happened | {"medians_s": [round(statistics.median(found), 3) for found in times_s.values()]}, wrong


def reloads(daemon: DaemonProcess, asked: argparse.Namespace) -> Outcome:
    """Add the third model by a reload, again and again, beside a stream of the first; return its first tokens."""
    operator, body = Operator(daemon), cases()[0]
    first, _, third = NAMES
    quiet = {name: Stream(daemon, body | {"model": name, "max_tokens": 600}).result() for name in (first, third)}
    whole = tomllib.loads(asked.config.read_text())
    times_s: dict[str, list[float]] = {"bare": [], "added": []}
    wrong: list[str] = []

    def reload(models: list[Any]) -> None:
        asked.config.write_text(tomli_w.dumps(whole | {"models": models}))
        daemon.process.send_signal(signal.SIGHUP)

    for _ in range(asked.switches):
        for way in times_s:
            operator.unload(third)
            if way == "added":
                reload(whole["models"][:2])
                operator.wait(lambda status: len(status["devices"][0]["models"]) == 2)
            beside = Stream(daemon, body | {"model": first, "max_tokens": 600})
            beside.wait_chunks(1)
            began_s = time.monotonic()
            if way == "added":
                reload(whole["models"])
                while third not in daemon.get("/v1/models"):
                    time.sleep(0.02)
            stream = Stream(daemon, body | {"model": third, "max_tokens": 600})
            stream.wait_chunks(1)
            times_s[way].append(stream.arrivals_s[0] - began_s)
            for name, one in ((third, stream), (first, beside)):
                if one.result() != quiet[name]:
                    wrong.append(f"{name} answered otherwise: {one.answer}")
        print({way: found[-1] for way, found in times_s.items()}, flush=True)
    happened: dict[str, Any] = {f"{way}_s": [round(one, 3) for one in found] for way, found in times_s.items()}
    medians_s = [statistics.median(found) for found in times_s.values()]
    return happened | {"added / bare": round(medians_s[1] / medians_s[0], 2)}, wrong


PARTS: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "history": (history, 2, {}),
    "dozing": (history, 2, {"wide": True, "keep_alive_s": 3}),
    "switches": (switches, 1, {}),
    "reloads": (reloads, 1, {}),
    "wakes": (wakes, 1, {"wide": True, "keep_alive_s": 0.5}),
}
"""Each with its number of devices, and what its models are like."""


def main() -> int:
    """Play; 0 when nothing went wrong."""
    parser = harness.parser_of(__doc__)
    parser.add_argument("what", choices=PARTS)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--think-s", type=float, default=0.3)
    parser.add_argument("--kill-every-s", type=float, default=12.0)
    parser.add_argument("--memory", default="", help="what each device may hold; default: two models and some KV")
    parser.add_argument("--switches", type=int, default=20)
    parser.add_argument("--pause-s", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="`wakes` alone runs on a GPU")
    asked = parser.parse_args()
    part, devices, kind = PARTS[asked.what]
    happened, wrong = play(part, devices, asked, **kind)
    happened |= {"load of the machine": round(os.getloadavg()[0], 1), "wrong": len(wrong)}
    table = "\n".join(["| what | found |", "|---|---|", *(f"| {what} | {found} |" for what, found in happened.items())])
    print(table, *wrong[:20], sep="\n")
    if asked.write:
        name = "gpu-wakes" if asked.device == "cuda" else f"several-models-{asked.what}"
        harness.record(name, table, "one GPU" if asked.device == "cuda" else "two CPU cores")
    return int(bool(wrong))


def one_on_a_gpu(directory: Path) -> str:
    """Write a model of a usual size, with weights that vLLM makes up, and a small one; return the configuration."""
    make_demo_model(directory / NAMES[1])
    CUDA.make_model(directory / NAMES[0])
    options = toml(CUDA.engine | {"kv_cache_memory_bytes": CUDA.kv_bytes})
    small = toml({"kv_cache_memory_bytes": 1 << 28, "gpu_memory_utilization": 0.1, "enforce_eager": True})
    return (
        f'models = [{{path = "{directory}/{NAMES[0]}", name = "{NAMES[0]}", keep_alive_s = 0.5, vllm = {options}}},\n'
        f'{{path = "{directory}/{NAMES[1]}", name = "{NAMES[1]}", pinned = true, vllm = {small}}}]\n'
        f'[idle]\nhost_cache_bytes = "32GiB"\n[devices]\ncuda = [0]\n'
    )


def play(part: Any, devices: int, asked: argparse.Namespace, **kind: Any) -> Outcome:
    """Play a part with a daemon of its own."""
    with tempfile.TemporaryDirectory() as directory:
        config = asked.config = Path(directory) / "melld.toml"
        if asked.device == "cuda":
            config.write_text(one_on_a_gpu(Path(directory)))
        else:
            memory = asked.memory or ("580MiB" if kind else "300MiB")
            config.write_text(
                f"{make_models(Path(directory), **kind)}[health]\nsteady_after_s = 0\n"
                f'[devices]\ncpu = {{count = {devices}, memory_bytes = "{memory}"}}\n'
            )
        with DaemonProcess(None, "--config", str(config), genuine=asked.device == "cuda") as daemon:
            daemon.wait_ready()
            print("ready", flush=True)
            happened, wrong = part(daemon, asked)
            if ended := daemon.stop():
                wrong.append(f"melld ended with {ended}")
    return happened, wrong


if __name__ == "__main__":
    sys.exit(main())
