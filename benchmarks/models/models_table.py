"""Several models on shared devices, simulated: the Landlord beside a fixed split and swapping whole models.

    python -m benchmarks.models.models_table --write benchmarks/results

Each row searches the greatest total rate at which 99 % of the requests end within 8 times what they take alone (`SLO`),
for every way of sharing, on the same arrivals; `low load` compares device-seconds at one rate.  All models doze in the
machine's memory at the start.  `fixed`: the Landlord without lending.  The split is by the true mean rates.
"""

import concurrent.futures
import functools
import random
from collections.abc import Callable, Sequence

import msgspec

from benchmarks.harness import parser_of, record
from benchmarks.models.tenancies import setting as settings
from benchmarks.models.tenancies.experiment import run_tenancy
from benchmarks.models.tenancies.setting import ModelArrival, RatedModel, Setting
from melld.ids import ModelName
from melld.simulator.catalogue import CARDS, MODELS
from melld.simulator.workload import LogNormal

CHAT = LogNormal(88.0, 1.1, 240.0, 0.83)
SECONDS, SEEDS = 200.0, 2
SLO = 0.99
STEP = 1.05
"""The search ends when the rate is known to this factor."""
WAYS = ("lending", "fixed", "split", "collated")

RATES = "| setting, requests per second | " + " | ".join(WAYS) + " | lending / split | lending / collated |"
LOW_LOAD = "| 16 models, 4 devices, alpha 2.1, req/s | lending | split | quotient | in time: lending | in time: split |"


class Case(msgspec.Struct, frozen=True):
    """A row: so many models of one kind on so many devices, with this popularity and shape."""

    name: str
    model: str
    count: int
    devices: int
    rates: Callable[[int, float], list[float]]
    first_per_s: float
    shape: str = "steady"


def skew(exponent: float) -> Callable[[int, float], list[float]]:
    """Return MuxServe's popularity."""
    return lambda count, total: settings.power_law(count, total, exponent)


def popular_few(count: int, total_per_s: float) -> list[float]:
    """Return rates of which a fifth of the models has half."""
    few = max(1, round(0.2 * count))
    return [total_per_s / 2 / few if rank < few else total_per_s / 2 / (count - few) for rank in range(count)]


def bursts(count: int, seed: int) -> settings.Shape:
    """Return a shape where each model has 4 times its mean rate for a part of each minute, and little otherwise."""
    chance = random.Random(seed)
    times, every_s = 4.0, 60.0
    offsets = [chance.random() * every_s for _ in range(count)]
    part = 0.8 / times
    low = 0.2 / (1.0 - part)

    def shape(index: int, at_s: float) -> float:
        return times if (at_s + offsets[index]) % every_s < part * every_s else low

    return shape


def drifting(rates: Sequence[float], every_s: float) -> settings.Shape:
    """Return a shape where the models change their places in the popularity, one by one."""

    def shape(index: int, at_s: float) -> float:
        place = (index + int(at_s // every_s)) % len(rates)
        return rates[place] / rates[index]

    return shape


CASES = (
    Case("KV scarce: 4 x Llama-2 7B, 1 device, alpha 0.9", "llama-2-7b", 4, 1, skew(0.9), 2.5),
    Case("KV scarce, bursts", "llama-2-7b", 4, 1, skew(0.9), 2.2, "bursts"),
    Case("KV plenty: 4 x Qwen2.5 7B, 1 device, alpha 0.9", "qwen2.5-7b", 4, 1, skew(0.9), 11.5),
    Case("12 x Llama-2 7B, 4 devices, alpha 0.9", "llama-2-7b", 12, 4, skew(0.9), 8.0),
    Case("12 x Llama-2 7B, 4 devices, alpha 2.1", "llama-2-7b", 12, 4, skew(2.1), 6.0),
    Case("16 x Llama-2 7B, 4 devices, 20 % have half, drifting", "llama-2-7b", 16, 4, popular_few, 8.0, "drift"),
)


def made(case: Case, rate_per_s: float, seed: int) -> tuple[Setting, list[ModelArrival]]:
    """Return the case's setting at a total rate, and a load."""
    rates = case.rates(case.count, rate_per_s)
    served = [RatedModel(ModelName(f"m{index}"), MODELS[case.model], rate) for index, rate in enumerate(rates)]
    estate = Setting(tuple(served), CARDS["a100-80g"], case.devices, dozing=True)
    shapes = {
        "steady": (settings.steady, 1.0),
        "bursts": (bursts(case.count, seed), 4.0),
        "drift": (drifting(rates, 60.0), max(rates) / min(rates)),
    }
    shape, peak = shapes[case.shape]
    load = settings.arrivals(served, SECONDS, CHAT, random.Random(seed), shape, peak)
    return estate, load


def attains(case: Case, way: str, rate_per_s: float) -> bool:
    """Return True if the way of sharing serves the rate within the SLO, all seeds taken together."""
    met = requests = 0.0
    for seed in range(SEEDS):
        report = run_tenancy(way, *made(case, rate_per_s, seed))
        met += report.attainment * report.requests
        requests += report.requests
        if met < SLO * requests - requests * 0.05:
            return False
    return met >= SLO * requests


def most_per_s(case: Case, way: str) -> float:
    """Return the greatest rate at the SLO; 0 if it is below a hundredth of the first guess."""
    low, high, rate = 0.0, 0.0, case.first_per_s / (16.0 if way == "collated" else 1.0)
    while not high or high / max(low, 1e-9) > STEP:
        if attains(case, way, rate):
            low = rate
            rate = rate * 1.5 if not high else (low * high) ** 0.5
        else:
            high = rate
            rate = rate / 2 if not low else (low * high) ** 0.5
        if not low and rate < case.first_per_s / 100:
            return 0.0
    return low


def ratio(rate_per_s: float, other_per_s: float) -> str:
    """Return a quotient for people."""
    return f"{rate_per_s / other_per_s:.2f}" if other_per_s else "-"


def rate_row(index: int) -> str:
    """Search one case, and return its line."""
    case = CASES[index]
    found = {way: most_per_s(case, way) for way in WAYS}
    cells = [case.name, *(f"{rate:.2f}" for rate in found.values())]
    cells += [ratio(found["lending"], found["split"]), ratio(found["lending"], found["collated"])]
    line = "| " + " | ".join(cells) + " |"
    print(line, flush=True)
    return line


def rate_rows(cases: int) -> list[str]:
    """Search the first so many cases, two at a time."""
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        return list(pool.map(rate_row, range(cases)))


def low_load_rows() -> list[str]:
    """Compare device-seconds at low load: 16 models, most of them hardly used."""
    rows = []
    for rate_per_s in (0.5, 1.0, 2.0):
        case = Case("", "llama-2-7b", 16, 4, skew(2.1), rate_per_s)
        reports = {
            way: [run_tenancy(way, *made(case, rate_per_s, seed)) for seed in range(SEEDS)]
            for way in ("lending", "split")
        }
        used = {way: sum(one.device_seconds for one in found) for way, found in reports.items()}
        met = {way: min(one.attainment for one in found) for way, found in reports.items()}
        cells = [
            f"{rate_per_s:g}",
            f"{used['lending']:.0f}",
            f"{used['split']:.0f}",
            ratio(used["lending"], used["split"]),
        ]
        cells += [f"{met['lending']:.1%}", f"{met['split']:.1%}"]
        rows.append("| " + " | ".join(cells) + " |")
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Make the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", choices=("rates", "low-load"), action="append", help="default: all")
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first so many of the rates")
    chosen = parser.parse_args()
    tables = {
        "rates": ("models", RATES, functools.partial(rate_rows, chosen.cases)),
        "low-load": ("models-low-load", LOW_LOAD, low_load_rows),
    }
    for only in chosen.only or tables:
        name, head, rows = tables[only]
        print(head, flush=True)
        lines = [head, "|---" * head.count(" | ") + "|---|", *rows()]
        if chosen.write:
            record(name, "\n".join(lines))


if __name__ == "__main__":
    main()
