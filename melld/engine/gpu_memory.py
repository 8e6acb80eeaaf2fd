"""GPU memory that processes share by descriptors: CUDA's virtual memory calls, bound with ctypes.

The memory lives as long as a descriptor or a mapping of it, whoever made it.  A maker, a process of its own, makes it
and exits, so that the daemon has no CUDA context.  The device is the first that the process sees.  No torch here.

    daemon ──nbytes──► maker ──a descriptor per chunk──► daemon ──► each worker, at birth ──► one range of addresses
"""

import ctypes
import functools
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from melld.errors import MelldError

CHUNK_BYTES = 256 << 20
MOST_CHUNKS = 64
"""As many descriptors fit into one message, and eight devices' into a process that may open 1,024 files."""
MAKER_S = 60.0
_PINNED, _DEVICE, _FILE_DESCRIPTOR, _READ_WRITE, _RECOMMENDED = 1, 1, 1, 3, 1
_ZERO = ctypes.c_uint64(0)
_BEGIN = "import sys; sys.path[:] = {path!r}; from melld.engine.gpu_memory import main; main(*map(int, sys.argv[1:]))"


class NoSharedMemory(MelldError):
    """The GPU's memory cannot be shared so; the message says which call failed."""


class Location(ctypes.Structure):
    """A `CUmemLocation`."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """A `CUmemAllocationProp`: the rest of it is zero."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("rest", ctypes.c_uint64 * 2),
    )


class Access(ctypes.Structure):
    """A `CUmemAccessDesc`."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


def chunks_of(nbytes: int, unit_bytes: int) -> tuple[int, ...]:
    """Return the sizes of the chunks that hold `nbytes`, each a multiple of `unit_bytes`."""
    chunk_bytes = _up(max(CHUNK_BYTES, -(-nbytes // MOST_CHUNKS)), unit_bytes)
    return tuple(_up(min(chunk_bytes, nbytes - start), unit_bytes) for start in range(0, nbytes, chunk_bytes))


def _up(nbytes: int, unit_bytes: int) -> int:
    return -(-nbytes // unit_bytes) * unit_bytes


# -- the daemon -------------------------------------------------------------------------------------------------------


def made_by_another(device_uuid: str, nbytes: int) -> tuple[list[int], tuple[int, ...]]:
    """Have a process make memory on this device; return a descriptor of each chunk, and their sizes.  Takes seconds.

    Raises:
        NoSharedMemory: it could not.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        code = _BEGIN.format(path=[entry or os.getcwd() for entry in sys.path])  # noqa: PTH109
        try:
            made = subprocess.run(  # noqa: S603  our own interpreter
                [sys.executable, "-c", code, str(theirs.fileno()), str(nbytes)],
                pass_fds=(theirs.fileno(),),
                env=os.environ | {"CUDA_VISIBLE_DEVICES": device_uuid},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=MAKER_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise NoSharedMemory(f"no reply after {MAKER_S:g} s") from error
        if made.returncode:
            last = made.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise NoSharedMemory("".join(last) or f"its maker ended with {made.returncode}")
        packet, descriptors, _, _ = socket.recv_fds(ours, 1 << 16, MOST_CHUNKS)
    return descriptors, msgspec.msgpack.decode(packet, type=tuple[int, ...])


def main(connection: int, nbytes: int) -> None:
    """Make `nbytes` of memory, send its descriptors over the socket `connection`, and return."""
    try:
        sizes, descriptors = zip(*_make(nbytes), strict=True)
    except NoSharedMemory as error:
        sys.exit(str(error))
    socket.send_fds(socket.socket(fileno=connection), [msgspec.msgpack.encode(sizes)], descriptors)


def _make(nbytes: int) -> Iterator[tuple[int, int]]:
    properties = Properties(_PINNED, _FILE_DESCRIPTOR, Location(_DEVICE, 0))
    unit = ctypes.c_size_t()
    _call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(properties), _RECOMMENDED)
    for size in chunks_of(nbytes, unit.value):
        handle, descriptor = ctypes.c_uint64(), ctypes.c_int()
        _call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(properties), _ZERO)
        _call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _FILE_DESCRIPTOR, _ZERO)
        yield size, descriptor.value


# -- a worker ---------------------------------------------------------------------------------------------------------


def map_chunks(descriptors: Sequence[int], sizes: Sequence[int]) -> int:
    """Map the chunks one after the other, for the life of this process; return the address.  Closes the descriptors.

    Raises:
        NoSharedMemory: they are not all there, or the driver refuses.
    """
    if len(descriptors) != len(sizes):
        raise NoSharedMemory(f"{len(descriptors)} of {len(sizes)} descriptors have arrived")
    address, total = ctypes.c_uint64(), ctypes.c_size_t(sum(sizes))
    _call("cuMemAddressReserve", ctypes.byref(address), total, ctypes.c_size_t(0), _ZERO, _ZERO)
    start = address.value
    for descriptor, size in zip(descriptors, sizes, strict=True):
        handle = ctypes.c_uint64()
        _call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), _FILE_DESCRIPTOR)
        os.close(descriptor)
        _call("cuMemMap", ctypes.c_uint64(start), ctypes.c_size_t(size), ctypes.c_size_t(0), handle, _ZERO)
        _call("cuMemRelease", handle)  # the mapping keeps it
        start += size
    access = Access(Location(_DEVICE, 0), _READ_WRITE)
    _call("cuMemSetAccess", address, total, ctypes.byref(access), ctypes.c_size_t(1))
    return address.value


def _call(name: str, *arguments: Any) -> None:
    if error := getattr(_driver(), name)(*arguments):
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(error, ctypes.byref(text))
        raise NoSharedMemory(f"{name}: {(text.value or b'').decode()} ({error})")


@functools.cache
def _driver() -> Any:
    """Return the driver's library, initialised; raise `NoSharedMemory` without one."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoSharedMemory(str(error)) from error
    if failed := library.cuInit(0):
        raise NoSharedMemory(f"cuInit: error {failed}")
    return library
