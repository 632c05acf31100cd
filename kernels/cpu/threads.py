"""Sets the number of threads of both pools that the CPU operations use: PyTorch's (OpenMP) and numba's.

numba runs on its `workqueue` layer, which is always available; its OpenMP layer would bind to a second OpenMP library
beside the one in PyTorch's wheel. The layer accepts calls from one thread at a time: the engine's step loop.

The layer starts its threads once, by default one per hyperthread. Every parallel kernel wakes all of them, also those
that have no part in it, and waits for them: with 64 on two cores, 32 tokens of 128,000 are drawn by two threads in 7 ms
instead of 0.45. So only those are started that compute.
"""

import os
from typing import Any

import numba
import torch
from numba.np.ufunc import parallel

_config: Any = numba.config  # its attributes are made at run time
_layer: Any = parallel
_config.THREADING_LAYER = "workqueue"


def max_num_threads() -> int:
    """Returns the size of numba's pool: the cores, or what NUMBA_NUM_THREADS says."""
    limit: int = _config.NUMBA_NUM_THREADS
    return limit


def set_num_threads(num_threads: int) -> None:
    """Sets both pools; call it on the thread that will run the model.

    The first call decides how many threads numba starts, unless a kernel has started them; later ones get no more.

    Raises: ValueError: fewer than one, or more than the size of numba's pool (the cores, or NUMBA_NUM_THREADS).
    """
    limit = max_num_threads()
    if not 1 <= num_threads <= limit:
        source = "NUMBA_NUM_THREADS" if os.environ.get("NUMBA_NUM_THREADS") else "the cores"
        raise ValueError(f"{num_threads} threads asked for, 1 to {limit} can be had ({source})")
    torch.set_num_threads(num_threads)
    if not getattr(_layer, "_is_initialized", True):  # not documented: where it is missing, numba starts all of them
        _layer.NUM_THREADS = num_threads
    numba.set_num_threads(min(num_threads, getattr(_layer, "NUM_THREADS", num_threads)))
