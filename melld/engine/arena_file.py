"""The file of an arena: KV memory of a device without a name in any directory, which the daemon makes and workers map.

Owns how it is opened and how parts of it are freed.  What nobody has written to takes no memory, and reads as zeros.
"""

import ctypes
import os

from melld.engine.wire.spec import ArenaSpec

_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01
_libc = ctypes.CDLL(None, use_errno=True)


def make_arena_file(nbytes: int) -> int:
    """Return a new file of this size, without memory so far."""
    file = os.memfd_create("melld-arena", os.MFD_CLOEXEC)
    os.ftruncate(file, nbytes)
    return file


def open_arena_file(spec: ArenaSpec) -> int:
    """Return the file that the specification names, opened in this process.

    Raises:
        OSError: it is not there.
    """
    file = os.open(spec.path, os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(file).st_ino != spec.inode:
        os.close(file)
        raise FileNotFoundError(f"{spec.path} is another file than the arena")
    return file


def punch(file: int, offset: int, nbytes: int) -> None:
    """Free the memory of this part, which then reads as zeros, also where it is mapped.  Releases the GIL.

    Raises:
        OSError: the kernel refuses.
    """
    start, length = ctypes.c_long(offset), ctypes.c_long(nbytes)
    if _libc.fallocate(file, _PUNCH_HOLE_KEEP_SIZE, start, length):
        code = ctypes.get_errno()
        raise OSError(code, f"cannot free {nbytes} bytes of the arena: {os.strerror(code)}")
