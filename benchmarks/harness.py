"""What all benchmarks stand on: kept tables, daemons and models to measure, paced workers, and simulated machines.

A benchmark with `--write` records its tables in benchmarks/results, and lays docs/benchmarks.md out anew.  The page
names one by `<!-- NAME: PREFIX | 1 3 -->`: the rows that begin with PREFIX (default: all), of these columns (default:
all).  What follows up to `<!-- end -->` is written.

`melld` and `vllm serve` are given the same words.  On a GPU the weights are made up by vLLM (`load_format = "dummy"`,
the same in every process): nothing is downloaded, and the work is that of a real model.
"""

import argparse
import datetime
import functools
import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import msgspec

from melld.demo_model import make_demo_model
from melld.simulator.catalogue import CARDS, MODELS, kv_capacity_bytes
from melld.simulator.latency import profile_for
from melld.simulator.settings import SimulatorSettings

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "out"
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


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser of a benchmark's flags, with `--write`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the tables in benchmarks/results")
    return parser


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows))


def rows_in_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Lay out rows with the same figures."""
    return markdown(list(rows[0]), [[str(value) for value in row.values()] for row in rows])


def record(name: str, table: str, machine: str = "simulated", *, beside: bool = False) -> None:
    """Save a table in Markdown, with the command that is running.

    `beside`: its rows replace those that begin alike, and the others stay.
    """
    columns, _, *rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()]
    if beside and (RESULTS / f"{name}.json").exists():
        new = {row[0] for row in rows}
        rows = [row for row in load(name)["rows"] if row[0] not in new] + rows
    script = Path(sys.argv[0]).resolve().relative_to(ROOT).with_suffix("")
    flags = (word for word in sys.argv[1:] if word != "--write")
    command = shlex.join(["python", "-m", ".".join(script.parts), *flags])
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    save(name, Table(command=command, date=today, machine=machine, columns=columns, rows=rows))


def save(name: str, table: Table) -> None:
    """Write one file, a row a line, and the page."""
    heads = [f" {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}," for k, v in table.items() if k != "rows"]
    rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in table["rows"])
    text = "\n".join(["{", *heads, ' "rows": [', rows, " ]", "}", ""])
    (RESULTS / f"{name}.json").write_text(text, encoding="utf-8")
    PAGE.write_text(page_text(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


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


GPU_MODEL = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}
"""The shape of Llama 3.1 8B, with the demo model's vocabulary: 128 KiB of KV a token, 14 GB of weights."""


@dataclass(frozen=True)
class Setting:
    """One kind of device."""

    kind: str
    devices: Callable[[int], tuple[str, ...]]
    """Flags of `melld serve` for so many workers."""
    kv_bytes: int
    """Of each worker."""
    engine: dict[str, Any]
    """Options of vLLM's engine, for melld and `vllm serve` alike."""
    shape: dict[str, Any] = field(default_factory=dict)
    """What the model's configuration has otherwise than the demo model's."""

    def make_model(self, directory: Path) -> None:
        """Write the model; one of another shape has no weights of its own."""
        make_demo_model(directory)
        if self.shape:
            path = directory / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | self.shape))
            for weights in directory.glob("*.safetensors"):
                weights.unlink()

    def serve_flags(self, workers: int) -> tuple[str, ...]:
        """Return the flags of `melld serve`: devices, memory, options; all workers in use, all the time."""
        options = self.engine | ({"kv_cache_memory_bytes": self.kv_bytes} if self.kind == "cuda" else {})
        words = [word for key, value in options.items() for word in ("--set", f"model.vllm.{key}={toml(value)}")]
        spread = ("--set", 'scheduler.policy="most-free"', "--set", "idle.sleep_after_s=inf")
        return (*self.devices(workers), *words, *spread)

    def vllm_words(self) -> list[str]:
        """Return the same for `vllm serve`."""
        words = ["--kv-cache-memory-bytes", str(self.kv_bytes)]
        for key, value in self.engine.items():
            flag = f"--{key.replace('_', '-')}"
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            words += [flag] if value is True else [flag, text]
        return words


def toml(value: Any) -> str:
    """Return a value of a configuration."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


def _cpu_devices(workers: int) -> tuple[str, ...]:
    return ("--device", f"cpu:{workers}", "--kv-bytes", str(CPU.kv_bytes))


def _one_gpu(workers: int) -> tuple[str, ...]:
    return ("--set", f"devices.cuda={[0] * workers}")


CPU = Setting(
    kind="cpu",
    devices=_cpu_devices,
    kv_bytes=192 << 20,  # 49,152 tokens of the demo model, whose own limit is 32,768
    engine={"dtype": "float32", "enforce_eager": True, "block_size": 32, "max_num_seqs": 64},
)
CUDA = Setting(
    kind="cuda",
    devices=_one_gpu,
    kv_bytes=8 << 30,  # 65,536 tokens
    engine={
        "dtype": "bfloat16",
        "load_format": "dummy",
        "max_model_len": 32768,
        # The other server, or another two workers, are on the GPU too: vLLM looks for so much free memory at its start.
        "gpu_memory_utilization": 0.25,
        # CUDA graphs for decoding, no torch.compile: two workers are ready within a minute on a machine that is new.
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    },
    shape=GPU_MODEL,
)
SETTINGS = {setting.kind: setting for setting in (CPU, CUDA)}
SMALL = Setting(
    kind="cpu",
    devices=_cpu_devices,
    kv_bytes=192 << 20,
    engine={"dtype": "float32", "enforce_eager": True, "block_size": 32, "max_num_seqs": 64, "load_format": "dummy"},
    shape={"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
           "num_key_value_heads": 1, "head_dim": 32},
)  # fmt: skip
"""A model that computes next to nothing, for workers that are paced."""
GREEDY = {"temperature": 0, "ignore_eos": True}

PACED = """
import time
from melld.engine.worker import main
made = main.EngineLoop.__init__
def paced(self, *arguments):
    made(self, *arguments)
    engine, budget = self._engine, self._parts.budget
    step = engine.step_fn
    def slow():
        end_s = time.monotonic() + {step_s}
        outputs = step()
        if budget._in_flight:
            counts = budget._in_flight[-1]
            end_s += {decode_s} * counts.decodes + {prompt_token_s} * counts.prompt_tokens
        time.sleep(max(0.0, end_s - time.monotonic()))
        return outputs
    engine.step_fn = slow
main.EngineLoop.__init__ = paced
"""


def paced_environment(
    directory: Path, step_s: float, decode_s: float, prompt_token_s: float, more: str = ""
) -> dict[str, str]:
    """Return the environment of a daemon whose processes begin with that program and `more`, written to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    program = PACED.format(step_s=step_s, decode_s=decode_s, prompt_token_s=prompt_token_s)
    (directory / "sitecustomize.py").write_text(program + more)
    return {"PYTHONPATH": os.pathsep.join([str(directory.resolve()), os.environ.get("PYTHONPATH", "")])}


GIB = 2**30
Result = TypeVar("Result")
OTHERS = {"mell-slo": (), "mell-plus": ("slo",)}
"""Folders of policies that a policy does not use; the others use neither."""


def machine_settings(model_name: str, card_name: str, **more: Any) -> SimulatorSettings:
    """Return the settings of GPUs of this card with this model, and what else is given."""
    model, card = MODELS[model_name], CARDS[card_name]
    return SimulatorSettings(
        capacity_bytes=kv_capacity_bytes(model, card),
        bytes_per_token=model.bytes_per_token,
        latency=profile_for(model, card),
        **more,
    )


def kept(path: Path, kind: type[Result], make: Callable[[], Result]) -> Result:
    """Return the result in the file; make and keep it if there is none."""
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=kind)
    result = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(result))
    part.rename(path)
    return result


@functools.cache
def source_of(policy: str) -> str:
    """Return a hash of the source that the policy's figures depend on.

    Read once, before the processes part: what runs is what was imported then, whatever is written meanwhile.
    """
    package = ROOT / "melld"
    files = [*(package / "simulator").glob("*.py")]
    files += [package / "simulator" / "data" / "latency.csv", *(package / "scheduler").glob("*.py")]
    others = next((names for known, names in OTHERS.items() if policy.startswith(known)), ("slo", "plus"))
    policies = (package / "scheduler" / "policies").rglob("*.py")
    files += [path for path in policies if path.parent.name not in others]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:10]
