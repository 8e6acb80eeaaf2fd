"""Settings of a simulation: the machines, the links between them, and how time passes."""

from collections.abc import Sequence

import msgspec
import numpy as np

from melld.scheduler.targets import Targets
from melld.simulator.catalogue import BLOCK_TOKENS
from melld.simulator.latency import Latency
from melld.simulator.links import LinkSettings

GPUS_PER_MACHINE = 8


class SimulatorSettings(msgspec.Struct, frozen=True):
    """Machines, links and time of one simulation.

    `gpus` None: as many as the policy wants.  `link` None: moves take no time and hold no memory twice.
    `paper_slots`: check overflow after the scheduler has acted on the epoch.  `wake_s`: seconds from a worker's
    activation until it computes.  `failure_rate`: share of moves that fail.  `block_tokens`: tokens of a KV block.
    `targets`: what the service promises; None: nothing is judged.  `tells_priorities`: the scheduler learns the
    priorities of the workload, else only the measures do.  `machine_lost_at_s`: when the first machine is lost.
    """

    capacity_bytes: int
    bytes_per_token: int
    latency: Latency
    gpus: int | None = None
    slots: int = 256
    epoch_s: float = 0.1
    paper_slots: bool = False
    wake_s: float = 0.0
    link: LinkSettings | None = None
    failure_rate: float = 0.0
    gpus_per_machine: int = GPUS_PER_MACHINE
    seed: int = 0
    block_tokens: int = BLOCK_TOKENS
    targets: Targets | None = None
    tells_priorities: bool = True
    machine_lost_at_s: float | None = None

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one KV block."""
        return self.block_tokens * self.bytes_per_token

    @property
    def most_tokens(self) -> int:
        """Return the tokens of the longest request that one worker can hold alone."""
        return self.capacity_bytes // self.block_bytes * self.block_tokens

    @property
    def instant_moves(self) -> bool:
        """Return True if a move is done as soon as it is decided."""
        return self.link is None and self.failure_rate == 0.0

    def kv_bytes_of(self, tokens: Sequence[int]) -> list[int]:
        """Return the bytes of the blocks for each token count."""
        blocks = -(-np.array(tokens, dtype=np.int64) // self.block_tokens)
        kv_bytes: list[int] = (blocks * self.block_bytes).tolist()
        return kv_bytes
