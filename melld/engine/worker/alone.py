"""Process groups of one worker, with as few network ports as can be.

torch's gloo opens a listening socket for every group, on whatever address the machine's name leads to: 13 for one
engine, open to the network where that name does.  Nobody ever connects to a group of one member, whose collectives are
copies in its own memory: torch's group without communication (`fake`) does just these.  Groups of several ranks
(`ranks`) listen, on the loopback interface alone.
"""

from collections.abc import Callable
from typing import Any


def open_no_ports() -> None:
    """Have torch make each gloo group of one member as one without sockets, from now on, here and in forks."""
    import torch.distributed
    import torch.testing._internal.distributed.fake_pg  # makes the backend known

    torch.distributed.init_process_group = _without_gloo(torch.distributed.init_process_group)
    torch.distributed.new_group = _without_gloo(torch.distributed.new_group)


def _without_gloo(make: Callable[..., Any]) -> Callable[..., Any]:
    def make_without_gloo(*arguments: Any, **options: Any) -> Any:
        backend = options.get("backend")
        members = options.get("ranks", arguments[0] if arguments else None)
        alone = len(members) == 1 if isinstance(members, list) else options.get("world_size", 1) == 1
        if isinstance(backend, str) and "gloo" in backend and alone:
            options["backend"] = backend.replace("gloo", "fake")
        return make(*arguments, **options)

    return make_without_gloo
