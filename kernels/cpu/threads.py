"""How many threads the CPU operations use, said in one place for both pools: PyTorch's (OpenMP) and numba's.

numba runs on its own `workqueue` layer: always there, where its OpenMP layer binds to a second OpenMP library beside
the one in PyTorch's wheel. The layer takes calls from one thread at a time: the engine's step loop is the only caller.
"""

import os
from typing import Any

import numba
import torch

_config: Any = numba.config  # its attributes are made at run time
_config.THREADING_LAYER = "workqueue"


def set_num_threads(num_threads: int) -> None:
    """Sets both pools; call it on the thread that will run the model.

    Raises: ValueError: fewer than one, or more than numba's pool was started with (the cores, or NUMBA_NUM_THREADS).
    """
    limit = _config.NUMBA_NUM_THREADS
    if not 1 <= num_threads <= limit:
        source = "NUMBA_NUM_THREADS" if os.environ.get("NUMBA_NUM_THREADS") else "the cores"
        raise ValueError(f"{num_threads} threads asked for, 1 to {limit} can be had ({source})")
    torch.set_num_threads(num_threads)
    numba.set_num_threads(num_threads)
