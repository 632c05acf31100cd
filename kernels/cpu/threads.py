"""Sets the number of threads of both pools that the CPU operations use: PyTorch's (OpenMP) and numba's.

numba runs on its `workqueue` layer, which is always available; its OpenMP layer would bind to a second OpenMP library
beside the one in PyTorch's wheel. The layer accepts calls from one thread at a time: the engine's step loop.
"""

import os
from typing import Any

import numba
import torch

_config: Any = numba.config  # its attributes are made at run time
_config.THREADING_LAYER = "workqueue"


def set_num_threads(num_threads: int) -> None:
    """Sets both pools; call it on the thread that will run the model.

    Raises: ValueError: fewer than one, or more than the size of numba's pool (the cores, or NUMBA_NUM_THREADS).
    """
    limit = _config.NUMBA_NUM_THREADS
    if not 1 <= num_threads <= limit:
        source = "NUMBA_NUM_THREADS" if os.environ.get("NUMBA_NUM_THREADS") else "the cores"
        raise ValueError(f"{num_threads} threads asked for, 1 to {limit} can be had ({source})")
    torch.set_num_threads(num_threads)
    numba.set_num_threads(num_threads)
