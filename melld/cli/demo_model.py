"""`melld demo-model DIR`: write the tiny demo model.

Owns the arguments and the output.  Never decides what the model is: `melld.demo_model` does.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from melld.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the sub-command to `parser`."""
    parser.description = "Create a tiny random Llama with a trained tokenizer and a chat template (about 16 MB)."
    parser.add_argument(
        "directory", metavar="DIR", type=Path, help="output directory; left as is if it already contains the model"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed for the random weights (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a sentence")


def run(arguments: argparse.Namespace) -> int:
    """Write the model; return 0, or 1 if the directory cannot be used."""
    from melld.demo_model import FILES, make_demo_model

    directory: Path = arguments.directory
    started_s = time.monotonic()
    try:
        make_demo_model(directory, arguments.seed)
    except (ConfigError, OSError) as error:
        print(f"melld demo-model: {error}", file=sys.stderr)
        return 1
    seconds = round(time.monotonic() - started_s, 2)
    size_bytes = sum((directory / name).stat().st_size for name in FILES)
    if arguments.json:
        report = {"directory": str(directory), "seed": arguments.seed, "size_bytes": size_bytes, "seconds": seconds}
        print(json.dumps(report))
    else:
        print(f"demo model in {directory} ({size_bytes / 1e6:.1f} MB, {seconds:.1f} s)")
    return 0
