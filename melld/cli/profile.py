"""`melld profile`: measure how much links and workers may do for moves, or show the figures in use.

Owns the request and the wording.
"""

import argparse

from melld.cli.asking import ask, describe
from melld.cli.render import size_text
from melld.control.messages import Profile, Profiled

DEADLINE_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the sub-command to `parser`."""
    does = (
        "Measure on the running, idle daemon how many bytes each link carries in an epoch, and how many tokens each "
        "worker can compute for moves without slowing its own requests. This takes at most a minute. The figures are "
        "saved, and used from then on."
    )
    parser.add_argument("--show", action="store_true", help="print the figures in use, without measuring")
    parser.add_argument(
        "--model", default="", metavar="NAME", help="the model whose workers are meant (default: the first)"
    )
    describe(parser, does, "measured or shown", "not measured (while requests run, for example)", "them as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Ask the daemon, wait, and print the figures; return the exit code."""
    question = Profile(measure=not arguments.show, model=arguments.model), DEADLINE_S
    return ask("profile", arguments, question, Profiled, in_words)


def in_words(profiled: Profiled) -> str:
    """Return the figures as lines of text."""
    limits = profiled.boundaries
    per_epoch = f"{limits.epoch_s * 1e3:g} ms"
    took = "" if profiled.took_s is None else f", in {profiled.took_s:.1f} s"
    lines = [f"{profiled.when}{took}"]
    if profiled.measured_unix_s is not None:
        lines.append(f"saved in {profiled.file}")
    lines += ["", f"Links, in an epoch of {per_epoch}"]
    for source, row in limits.links.items():
        for destination, count in row.items():
            rate = size_text(int(count / limits.epoch_s))
            lines.append(f"  {source} > {destination}  {size_text(count):>9}  ({rate}/s)")
    lines.append(f"  others   {size_text(limits.other_link_bytes):>9}")
    for worker, count in limits.ports_out.items():
        lines.append(f"  {worker} > all  {size_text(count):>9}")
    for worker, count in limits.ports_in.items():
        lines.append(f"  all > {worker}  {size_text(count):>9}")
    lines += [f"  {segment.name}: {size_text(segment.nbytes)} together" for segment in limits.segments]
    lines += ["", f"Tokens computed for moves in an epoch of {per_epoch}, by number of decoding requests"]
    for name, table in [*limits.prefill.items(), ("others", limits.other_prefill)]:
        lines.append(f"  {name:<8} " + ", ".join(f"{tokens:,} at {batch}" for batch, tokens in table))
    return "\n".join([*lines, *(f"! {note}" for note in profiled.notes)])
