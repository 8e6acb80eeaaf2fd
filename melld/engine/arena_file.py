"""Frees or unshares parts of an arena: a device's KV memory, in a file of the daemon that workers map.

What nobody has written to takes no memory, and reads as zeros.
"""

import ctypes
import mmap
import os

_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01
_MAP_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_size_t
_libc.mmap.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


def punch(file: int, offset: int, nbytes: int) -> None:
    """Free the memory of this part, which then reads as zeros in every mapping.  Releases the GIL.

    Raises:
        OSError: the kernel refuses.
    """
    start, length = ctypes.c_long(offset), ctypes.c_long(nbytes)
    if _libc.fallocate(file, _PUNCH_HOLE_KEEP_SIZE, start, length):
        code = ctypes.get_errno()
        raise OSError(code, f"cannot free {nbytes} bytes of the arena: {os.strerror(code)}")


def keep_to_itself(address: int, nbytes: int) -> None:
    """Replace this process's shared mapping there by private zeros.

    Raises:
        OSError: the kernel refuses.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    if _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != address:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {nbytes} bytes: {os.strerror(code)}")
