"""vLLM's GPU KV caches are copied whole, block by block, or refused with a reason."""

import os

from melld.engine.arguments import COMMON_ENVIRONMENT, CPU_ENVIRONMENT
from tests.forked import ROOT, run_python

OF_LAYERS = {"LBHNC", "LBNHC"}
BLOCKS_FIRST = {"BLHNC", "BLNHC"}


def test_each_kv_layout_is_copied_whole_or_refused() -> None:
    """`kv_layouts` checks each byte of each block; this tests what happens to which cache."""
    environment = os.environ | COMMON_ENVIRONMENT | CPU_ENVIRONMENT
    done = run_python("-m", "tests.contracts.kv_layouts", cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    told = [line.split("|") for line in done.stdout.splitlines() if line.count("|") == 2]
    became = {(name, layout): result for name, layout, result in told}
    for name, chunk_bytes in (
        ("FlashAttention", 1024),
        ("two groups over each other", 1024),
        ("latent attention", 1152),
    ):
        expected = dict.fromkeys(OF_LAYERS, f"3 chunks of {chunk_bytes}")
        expected |= dict.fromkeys(BLOCKS_FIRST, f"1 chunks of {3 * chunk_bytes}")
        assert {layout: became[name, layout] for layout in OF_LAYERS | BLOCKS_FIRST} == expected
    mixed = "latent attention with an indexer"
    for layout in OF_LAYERS:
        assert became[mixed, layout].startswith("tokens only: the layers' blocks lie [256, 1152] bytes apart")
        assert became["FlashAttention, blocks that the kernel splits", layout] == "3 chunks of 2048"
    assert {became[mixed, layout] for layout in BLOCKS_FIRST} == {"1 chunks of 4224"}
