"""Messages between the daemon, its launcher, and the agents on other machines, in the framing of `engine.wire.frames`.

Owns the messages, without I/O.  What a worker and the daemon say to each other travels in `Bytes`, unread.

    daemon ◄─socket pair─► launcher ──Ray──► actor ◄─socket pair─► agent ◄─TLS─► daemon
"""

from collections.abc import Iterator, Sequence

import msgspec

from melld.engine.host.standstill import Reach, Standstill
from melld.engine.wire.frames import Buffer
from melld.engine.wire.spec import WorkerSpec
from melld.kvstore.device_reading import Device
from melld.kvstore.worker_readings import WorkerReading

MAX_PIECE_BYTES = 1 << 18
"""Most bytes of a worker's wire in one envelope, so that one worker's long message hardly delays the others."""
MAX_ENVELOPE_BYTES = 1 << 20
"""A larger frame is refused."""
MAX_PARTS = 512


class Envelope(msgspec.Struct, frozen=True, tag=True):
    """The head of a frame."""


class ModelFiles(msgspec.Struct, frozen=True):
    """A model's directory, file or hub name, and where vLLM finds it."""

    path: str
    revision: str | None = None
    download_dir: str | None = None
    """Of weights alone."""


class Facts(msgspec.Struct, frozen=True):
    """Facts that must be equal on all machines."""

    versions: dict[str, str]
    """Of packages."""
    model_digests: dict[str, str]
    """By model path; "" for a model that is not there."""


class OfWorker(Envelope, frozen=True, tag=True):
    """Envelope about a worker: `number` names it on its connection, and no two have the same."""

    number: int


# -- both ways between daemon and agent --------------------------------------------------------------------------------


class Bytes(OfWorker, frozen=True, tag=True):
    """The next bytes of a worker's wire: the payload."""


class Beat(Envelope, frozen=True, tag=True):
    """Sent regularly, so that silence means a loss."""


class Leave(Envelope, frozen=True, tag=True):
    """An orderly end of the connection; the agent ends its workers."""

    reason: str


# -- agent to daemon ---------------------------------------------------------------------------------------------------


class Hello(Envelope, frozen=True, tag=True, kw_only=True):
    """The first envelope.  `token`: from the summons, valid once."""

    token: str
    machine: str
    facts: Facts
    devices: tuple[Device, ...]
    """On a CPU without a `uuid`."""


class Forked(OfWorker, frozen=True, tag=True):
    """See `host.ports.Ear.forked`."""

    pid: int


class Printed(OfWorker, frozen=True, tag=True):
    """See `host.ports.Ear.printed`."""

    line: str


class Exited(OfWorker, frozen=True, tag=True):
    """See `host.ports.Ear.exited`."""

    reason: str
    from_outside: bool


class Readings(Envelope, frozen=True, tag=True):
    """The latest device readings of a machine's workers, by worker."""

    readings: dict[str, WorkerReading]


class Seen(OfWorker, frozen=True, tag=True):
    """The answer to `Look`."""

    seen: Standstill


# -- daemon to agent ---------------------------------------------------------------------------------------------------


class Spawn(OfWorker, frozen=True, tag=True):
    """Start a worker."""

    spec: WorkerSpec


class Kill(OfWorker, frozen=True, tag=True):
    """Kill that worker; `Exited` answers."""


class Look(OfWorker, frozen=True, tag=True):
    """Check that worker's progress (`Child.look`); `Seen` answers."""

    reach: Reach


# -- actor and agent, which it starts ----------------------------------------------------------------------------------


class Summons(Envelope, frozen=True, tag=True, kw_only=True):
    """The data that an agent is started with."""

    host: str
    """Where the daemon listens."""
    port: int
    certificate: str
    """The only certificate that the agent accepts there, as PEM."""
    token: str
    machine: str
    device_kind: str
    devices: int
    """Most devices to use."""
    models: tuple[ModelFiles, ...]
    environment: dict[str, str]
    """Environment of its workers, which overrides the machine's."""
    silence_s: float


class Seated(Envelope, frozen=True, tag=True):
    """The seats that the agent has: what Ray calls the GPU of each; "" for CPU devices."""

    gpus: tuple[str, ...]


# -- launcher and daemon -----------------------------------------------------------------------------------------------


class Launch(Envelope, frozen=True, tag=True):
    """Start an agent on this node, replacing any earlier one of this daemon."""

    node: str
    summons: Summons


class Node(msgspec.Struct, frozen=True):
    """A node of the cluster that is alive and has devices.  `address` names the machine."""

    id: str
    address: str
    devices: int


class HeadFound(Envelope, frozen=True, tag=True):
    """The cluster can be used; the launcher connects."""


class Joined(Envelope, frozen=True, tag=True):
    """The launcher is connected to the cluster, which knows this machine by `address`."""

    address: str


class Nodes(Envelope, frozen=True, tag=True):
    """All nodes with devices; sent again when they change."""

    nodes: tuple[Node, ...]


class AgentEnded(Envelope, frozen=True, tag=True):
    """An agent's actor has ended, or could not be started."""

    node: str
    reason: str


class LauncherFailed(Envelope, frozen=True, tag=True):
    """The launcher cannot work and exits."""

    reason: str


ToDaemon = Hello | Forked | Bytes | Printed | Exited | Readings | Seen | Beat | Leave
ToAgent = Spawn | Kill | Look | Bytes | Beat | Leave
FromActor = Summons | Seated
ToActor = Leave
FromLauncher = HeadFound | Joined | Nodes | AgentEnded | LauncherFailed


def pieces(buffers: Sequence[Buffer]) -> Iterator[list[Buffer]]:
    """Split what is written to a worker's wire into parts that each fit into an envelope."""
    piece: list[Buffer] = []
    room = MAX_PIECE_BYTES
    for buffer in buffers:
        rest = memoryview(buffer).cast("B")
        while rest:
            piece.append(rest[:room])
            taken = len(piece[-1])
            rest, room = rest[taken:], room - taken
            if not room or len(piece) == MAX_PARTS:
                yield piece
                piece, room = [], MAX_PIECE_BYTES
    if piece:
        yield piece
