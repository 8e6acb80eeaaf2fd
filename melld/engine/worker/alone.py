"""Process groups of one worker, without network ports.

torch's gloo opens a listening socket for every group, on whatever address the machine's name leads to: 13 for one
engine, open to the network where that name does.  Nobody ever connects: a group here has one member, whose collectives
are copies in its own memory.  torch's group without communication (`fake`) does just these where there is one member;
with more it would be wrong, and is refused.
"""

from collections.abc import Callable
from typing import Any


def open_no_ports() -> None:
    """Have torch make each gloo group of this process as one without sockets, from now on."""
    import torch.distributed
    import torch.testing._internal.distributed.fake_pg  # makes the backend known

    torch.distributed.init_process_group = _without_gloo(torch.distributed.init_process_group)
    torch.distributed.new_group = _without_gloo(torch.distributed.new_group)


def _without_gloo(make: Callable[..., Any]) -> Callable[..., Any]:
    def make_without_gloo(*arguments: Any, **options: Any) -> Any:
        backend = options.get("backend")
        if isinstance(backend, str) and "gloo" in backend:
            if options.get("world_size", 1) != 1:
                raise ValueError("a worker's process groups have one member")
            options["backend"] = backend.replace("gloo", "fake")
        return make(*arguments, **options)

    return make_without_gloo
