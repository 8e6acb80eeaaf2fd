"""Links of a worker whose KV memory belongs to its ranks, over ranks without a model."""

import json

from tests.forked import run_python

MAIN = """
import json, os, signal
from pathlib import Path
from types import SimpleNamespace
from melld.engine.worker import rank_links
from melld.migrate.transports.layout import layout_of
from melld.migrate.transports.transport import TransportFailed, handle_of
from tests.migrate.transports.other_process import Sibling
from tests.migrate.transports.sibling import BLOCKS, make_cache

lines = rank_links.Lines(2)
os.register_at_fork(after_in_child=lines.own_in_rank, after_in_parent=lines.forked)
ranks = []
for _ in range(2):
    if not (rank := os.fork()):
        tensors = make_cache()
        config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
        runner = SimpleNamespace(device=tensors[0].device, kv_caches=tensors, vllm_config=config)
        worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
        rank_links._Rank(worker, BLOCKS).serve(rank_links._line)
    ranks.append(rank)
lines.serve(SimpleNamespace(collective_rpc=lambda *_, **__: None), BLOCKS)
peers = [Sibling(), Sibling()]
layout = layout_of(make_cache(), BLOCKS)
handle = handle_of(rank_links.NAME, layout, [peer.handle for peer in peers])
peers[1].kill()
try:
    lines.open(handle, range(4))
except TransportFailed as error:
    why = str(error)
peers[0].kill()
maps = Path(f"/proc/{ranks[0]}/maps").read_text().splitlines()
print(json.dumps([why, len({line.split()[4] for line in maps if "melld-kv" in line})]))
for rank in ranks:
    os.kill(rank, signal.SIGKILL)
os._exit(0)
"""


def test_a_link_that_one_rank_cannot_open_keeps_no_peer_memory() -> None:
    """A peer that dies while its links open must not leave its KV memory mapped in the other ranks."""
    done = run_python("-c", MAIN)
    assert not done.returncode, done.stderr
    why, mapped = json.loads(done.stdout.splitlines()[-1])
    assert "cannot open the peer's memory" in why
    assert mapped == 1
