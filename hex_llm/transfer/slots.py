"""Memory for a few parts, which two processes of one machine can share."""

import fcntl
import mmap
import os
import sys
from typing import Self

from hex_llm.frames import Broken

SHARED = sys.platform == "linux"


class Slots:
    """`count` pieces of `size` bytes each."""

    def __init__(self, size: int, count: int, file: int = -1):
        """Of this process alone without a file; the file can be closed afterwards."""
        self._size = size
        self._stride = _stride(size)
        self.count = count
        # Present from the start: memory that is written for the first time is ten times as slow.
        flags = (mmap.MAP_PRIVATE if file < 0 else mmap.MAP_SHARED) | getattr(mmap, "MAP_POPULATE", 0)
        anonymous = mmap.MAP_ANONYMOUS if file < 0 else 0
        self._memory = mmap.mmap(file, self._stride * count, flags=flags | anonymous)

    @classmethod
    def of_file(cls, size: int, count: int, file: int) -> Self:
        """What another process has made; the file is closed."""
        try:
            if (
                os.fstat(file).st_size != _stride(size) * count
                or not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            ):
                raise Broken("The shared memory of another engine has another size than parts here, or might lose it.")
            return cls(size, count, file)
        finally:
            os.close(file)

    def __getitem__(self, slot: int) -> memoryview:
        start = slot * self._stride
        return memoryview(self._memory)[start : start + self._size]


def memory_file(size: int, count: int) -> int:
    """A file of memory for so many slots, with no name in any folder."""
    file = os.memfd_create("hex-llm blocks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, _stride(size) * count)
        # To read memory that another process has taken away would be this one's death.
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except BaseException:
        os.close(file)
        raise
    return file


def _stride(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
