"""How the process holds memory: long prompts come and go, and what they took must go back to the node.

By default glibc raises the size from which a block is mapped apart as soon as such blocks are freed, keeps later ones
in its heaps, and so holds on to the peak (measured: 256 prompts of 200 KB left 45 MB behind). A fixed size stops that.
"""

import ctypes
import gc

LARGE_BLOCK = 65_536  # bytes
_M_MMAP_THRESHOLD = -3  # malloc.h


def settle() -> None:
    """Call once, when everything that stays has been made: it is left out of collections from now on, and large blocks
    are given back as soon as they are freed."""
    gc.freeze()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; elsewhere the default stays
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK)
