"""Bindings of CUDA runtime and driver calls that torch does not offer: IPC handles and batched copies.

Uses ctypes on the libraries that torch has loaded.  Creates no CUDA context.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from melld.migrate.transports.transport import TransportFailed

_LAZY_ENABLE_PEER_ACCESS = 1
_SOURCE_ACCESS_IN_STREAM_ORDER = 1
_PREFER_OVERLAP_WITH_COMPUTE = 1
_BATCH_SINCE_CUDA = (13, 0)  # earlier versions of cudaMemcpyBatchAsync took another argument


class IpcHandle(ctypes.Structure):
    """A `cudaIpcMemHandle_t`: 64 opaque bytes."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    """A `cudaMemcpyAttributes`."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


def device_uuid(index: int) -> str:
    """Return the device's UUID, the same in every process whatever its index there."""
    return str(torch.cuda.get_device_properties(index).uuid)


def device_of_uuid(uuid: str) -> int | None:
    """Return the device's index in this process, or None if it is not visible."""
    return next((index for index in range(torch.cuda.device_count()) if device_uuid(index) == uuid), None)


def ipc_handle(address: int) -> tuple[bytes, int]:
    """Return the handle of the allocation that holds `address`, and the offset of `address` in it.

    Raises:
        TransportFailed: the memory was not allocated by cudaMalloc (an expandable segment, vLLM's sleep-mode pool).
    """
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    found = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    if found != 0:
        raise TransportFailed("cuda", f"cuMemGetAddressRange: error {found}")
    handle, start = IpcHandle(), ctypes.c_void_p(base.value)
    given = _runtime().cudaIpcGetMemHandle(ctypes.byref(handle), start)
    _check("cudaIpcGetMemHandle (only for memory of cudaMalloc, not of cuMemMap: expandable segments, sleep)", given)
    return bytes(handle.reserved), address - int(base.value)


def open_ipc_handle(handle: bytes, device: int) -> int:
    """Map a peer's allocation into the context of `device`; return the address of its start.

    Raises:
        TransportFailed: the peer is gone, or this device has no peer access to its device.
    """
    given = IpcHandle((ctypes.c_ubyte * 64).from_buffer_copy(handle))
    address = ctypes.c_void_p()
    with torch.cuda.device(device):
        opened = _runtime().cudaIpcOpenMemHandle(ctypes.byref(address), given, ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS))
    _check("cudaIpcOpenMemHandle", opened)
    return int(address.value or 0)


def close_ipc_handle(address: int, device: int) -> None:
    """Unmap what `open_ipc_handle` mapped."""
    with torch.cuda.device(device):
        _check("cudaIpcCloseMemHandle", _runtime().cudaIpcCloseMemHandle(ctypes.c_void_p(address)))


def batch_copies_supported() -> bool:
    """Return True if this runtime has cudaMemcpyBatchAsync in the form used here."""
    if torch.version.cuda is None:
        return False
    version = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
    return version >= _BATCH_SINCE_CUDA and hasattr(_runtime(), "cudaMemcpyBatchAsync")


def copy_batch(
    destinations: "np.ndarray[Any, Any]", sources: "np.ndarray[Any, Any]", nbytes: int, stream: torch.cuda.Stream
) -> None:
    """Enqueue one driver call that copies `nbytes` from each source address to its destination (uint64 arrays).

    The copy engines run it beside the SMs' kernels.  `stream` must not be the legacy default stream.

    Raises:
        TransportFailed: the driver refused.
    """
    sizes = np.full(len(sources), nbytes, dtype=np.uint64)
    first = ctypes.c_size_t(0)
    attributes = _CopyAttributes(source_access_order=_SOURCE_ACCESS_IN_STREAM_ORDER, flags=_PREFER_OVERLAP_WITH_COMPUTE)
    enqueued = _runtime().cudaMemcpyBatchAsync(
        ctypes.c_void_p(destinations.ctypes.data),
        ctypes.c_void_p(sources.ctypes.data),
        ctypes.c_void_p(sizes.ctypes.data),
        ctypes.c_size_t(len(sources)),
        ctypes.byref(attributes),
        ctypes.byref(first),
        ctypes.c_size_t(1),
        ctypes.c_void_p(stream.cuda_stream),
    )
    _check("cudaMemcpyBatchAsync", enqueued)


def end_of(stream: torch.cuda.Stream) -> Callable[[], None]:
    """Return a function that waits for all work queued on `stream`, without spinning or holding the GIL."""
    reached = torch.cuda.Event(blocking=True)
    reached.record(stream)

    def wait() -> None:
        reached.synchronize()

    return wait


def chunk_addresses(
    base: int, blocks: Sequence[int], stride: int, offsets: Sequence[int]
) -> "np.ndarray[Any, np.dtype[np.uint64]]":
    """Return the address of every chunk of every block (uint64, blocks outermost)."""
    starts = np.asarray(blocks, dtype=np.uint64)[:, None] * np.uint64(stride)
    return (np.uint64(base) + starts + np.asarray(offsets, dtype=np.uint64)[None, :]).ravel()


def _check(call: str, error: int) -> None:
    if error != 0:
        _runtime().cudaGetLastError()  # clear the error: torch would report it for a later call
        text = _runtime().cudaGetErrorString(error)
        raise TransportFailed("cuda", f"{call}: {(text or b'').decode()} ({error})")


@functools.cache
def _runtime() -> Any:
    torch.cuda.init()
    major = (torch.version.cuda or "0").split(".")[0]
    library = ctypes.CDLL(f"libcudart.so.{major}")
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
