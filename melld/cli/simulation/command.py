"""`melld simulate`: policies on a trace or on generated load, in virtual time, with the daemon's own scheduler.

Owns how the flags combine, the files read and written, and the output.  Never simulates itself: `melld.simulator` does.
"""

import argparse
import math
import random
import sys

import msgspec

from melld.cli import BAD_USAGE, DONE, FAILED
from melld.cli.simulation.flags import add_load, add_machines, add_output, add_scheduler
from melld.cli.simulation.report import replay_text, table
from melld.config import SchedulerConfig
from melld.decisions.records import encode, read
from melld.decisions.replay import replay
from melld.errors import ConfigError, MelldError
from melld.scheduler.targets import Targets
from melld.simulator import workload as workloads
from melld.simulator.catalogue import card_by_name, kv_capacity_bytes, model_by_name
from melld.simulator.experiment import ALL_POLICIES, PolicyOutcome, SchedulerChoices, run_policy
from melld.simulator.latency import ConstantLatency, profile_for
from melld.simulator.links import LinkSettings
from melld.simulator.settings import GPUS_PER_MACHINE, SimulatorSettings
from melld.simulator.workload import Workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the sub-command to `parser`."""
    parser.description = "Run scheduling policies on a workload in virtual time and report what each would have cost."
    add_load(parser.add_argument_group("workload"))
    add_machines(parser.add_argument_group("machines"))
    add_scheduler(parser.add_argument_group("scheduler"))
    add_output(parser.add_argument_group("output"))


def run(arguments: argparse.Namespace) -> int:
    """Simulate and print; return 0, 1 for an unusable file or a stuck policy, 2 for flags that cannot be combined."""
    try:
        policies = _policies(arguments)
        if arguments.replay is not None:
            return _replay(arguments, policies)
        settings = _settings(arguments)
        workload = _workload(arguments)
        if arguments.high_part is not None:
            workload = workload.with_high(arguments.high_part, random.Random(arguments.seed))
        reports = [_run_one(policy, arguments, settings, workload).report for policy in policies]
        if arguments.json:
            sys.stdout.buffer.write(msgspec.json.encode({"policies": reports}) + b"\n")
        else:
            print(table(reports, settings))
        return DONE
    except ConfigError as error:
        print(f"melld simulate: {error}", file=sys.stderr)
        return BAD_USAGE if error.where.startswith("--") else FAILED
    except BrokenPipeError:
        raise
    except (MelldError, OSError) as error:
        print(f"melld simulate: {error}", file=sys.stderr)
        return FAILED


def _policies(arguments: argparse.Namespace) -> list[str]:
    names = [name.strip() for name in (arguments.policy or SchedulerConfig().policy).split(",")]
    for name in names:
        if name not in ALL_POLICIES:
            raise ConfigError("--policy", f"{name!r} is not one of {', '.join(ALL_POLICIES)}")
    if arguments.decision_log is not None and len(names) > 1:
        raise ConfigError("--decision-log", "a log holds the decisions of one policy: give one --policy")
    return list(dict.fromkeys(names))


def _settings(arguments: argparse.Namespace) -> SimulatorSettings:
    sized = arguments.capacity_bytes is not None
    if sized != (arguments.bytes_per_token is not None):
        raise ConfigError("--capacity-bytes", "requires --bytes-per-token, and vice versa")
    if sized and (arguments.model or arguments.gpu):
        raise ConfigError("--capacity-bytes", "cannot be combined with --model and --gpu")
    model, card = model_by_name(arguments.model or "llama-2-13b"), card_by_name(arguments.gpu or "a100-40g")
    capacity_bytes = arguments.capacity_bytes if sized else kv_capacity_bytes(model, card)
    profile = profile_for(model, card)
    prefill_token_s = profile.prefill_s(1024) / 1024
    constant = None if arguments.step_ms is None else ConstantLatency(arguments.step_ms / 1e3, prefill_token_s)
    settings = SimulatorSettings(
        capacity_bytes=capacity_bytes,
        bytes_per_token=arguments.bytes_per_token if sized else model.bytes_per_token,
        latency=constant or profile,
        gpus=arguments.gpus,
        slots=arguments.slots,
        epoch_s=arguments.epoch_ms / 1e3,
        paper_slots=arguments.paper_slots,
        wake_s=arguments.wake_s,
        link=_link(arguments),
        failure_rate=arguments.failure_rate,
        gpus_per_machine=GPUS_PER_MACHINE if arguments.machines is None else arguments.gpus // arguments.machines,
        seed=arguments.seed,
        targets=_targets(arguments),
        machine_lost_at_s=arguments.lose_machine_s,
    )
    if settings.most_tokens == 0:
        raise ConfigError("--capacity-bytes", "is less than one block of 16 tokens")
    return settings


def _link(arguments: argparse.Namespace) -> LinkSettings | None:
    machines, rate, between_rate = arguments.machines, arguments.link_rate, arguments.machine_link_rate
    if machines is not None and (rate is None or arguments.gpus is None or arguments.gpus % machines):
        raise ConfigError("--machines", "requires --link-rate, and --gpus as a multiple of it")
    if machines is None and (between_rate is not None or arguments.lose_machine_s is not None):
        raise ConfigError("--machine-link-rate" if between_rate else "--lose-machine-s", "needs --machines")
    if machines == 1 and arguments.lose_machine_s is not None:
        raise ConfigError("--lose-machine-s", "requires --machines of 2 or more: otherwise nothing would be left")
    if rate is None:
        return None
    if between_rate is None:
        return LinkSettings(rate, kv_between_machines=machines is None)
    per_machine = arguments.gpus // machines
    return LinkSettings(rate, gpus_per_switch=per_machine, switch_bytes_per_s=between_rate)


def _targets(arguments: argparse.Namespace) -> Targets | None:
    itl_ms, ttft_s = arguments.itl_target_ms, arguments.ttft_target_s
    if itl_ms is None and ttft_s is None:
        return None
    targets = Targets(None if itl_ms is None else itl_ms / 1e3)
    return targets if ttft_s is None else msgspec.structs.replace(targets, ttft_s=ttft_s)


def _workload(arguments: argparse.Namespace) -> Workload:
    chance = random.Random(arguments.seed)
    lengths = None if arguments.lengths is None else workloads.parse_lengths(arguments.lengths)
    if arguments.poisson is not None:
        if lengths is None or arguments.seconds == math.inf:
            raise ConfigError("--poisson", "requires --lengths and --seconds")
        if arguments.rate is not None:
            raise ConfigError("--rate", "is for --trace")
        made = workloads.gamma(arguments.poisson, arguments.variation, arguments.seconds, lengths, chance)
        if not len(made):
            raise ConfigError("--seconds", "no request arrives in this time: increase it")
        return made.scaled(arguments.length_factor)
    trace = workloads.read_trace(arguments.trace)
    if arguments.rate is not None and len(trace):
        trace = trace.stretched(arguments.rate)
    if lengths is not None:
        trace = trace.with_lengths(lengths, chance)
    trace = trace.until(arguments.seconds)
    if not len(trace):
        raise ConfigError("--seconds", "no request of the trace arrives in this time: increase it")
    return trace.scaled(arguments.length_factor)


def _run_one(
    policy: str, arguments: argparse.Namespace, settings: SimulatorSettings, workload: Workload
) -> PolicyOutcome:
    choices = SchedulerChoices(retire_after_s=arguments.retire_after_s)
    if arguments.decision_log is None:
        return run_policy(policy, settings, workload, choices)
    with arguments.decision_log.open("wb") as file:
        return run_policy(policy, settings, workload, choices, lambda record: file.write(encode(record)))


def _replay(arguments: argparse.Namespace, policies: list[str]) -> int:
    """Replay a decision log; return 0 if every decision is the same, 1 at the first that differs."""
    if len(policies) > 1 or arguments.decision_log:
        raise ConfigError("--replay", "takes one --policy at most, and cannot be combined with --decision-log")
    with arguments.replay.open("rb") as file:
        result = replay(read(file), ALL_POLICIES, policies[0] if arguments.policy else None)
    if arguments.json:
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
    else:
        print(replay_text(result))
    return DONE if result.difference is None else FAILED
