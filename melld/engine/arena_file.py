"""How parts of an arena are freed: KV memory of a device, in a file that the daemon makes and workers map.

What nobody has written to takes no memory, and reads as zeros.
"""

import ctypes
import os

_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01
_libc = ctypes.CDLL(None, use_errno=True)


def punch(file: int, offset: int, nbytes: int) -> None:
    """Free the memory of this part, which then reads as zeros, also where it is mapped.  Releases the GIL.

    Raises:
        OSError: the kernel refuses.
    """
    start, length = ctypes.c_long(offset), ctypes.c_long(nbytes)
    if _libc.fallocate(file, _PUNCH_HOLE_KEEP_SIZE, start, length):
        code = ctypes.get_errno()
        raise OSError(code, f"cannot free {nbytes} bytes of the arena: {os.strerror(code)}")
