"""`set_num_threads` sets the pools of PyTorch and numba."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from kernels.cpu.threads import set_num_threads
from tests.hang import HANG_S


def printed(code: str, **variables: str) -> str:
    """What a process prints that has not used numba's threads."""
    environment = {**os.environ, **variables, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [
        sys.executable,
        "-c",
        f"import os, numba, torch\nfrom kernels.cpu.threads import set_num_threads\n{code}",
    ]
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=HANG_S
    ).stdout.strip()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_set_num_threads_sets_both_pools(num_threads: int) -> None:
    counts = "torch.get_num_threads(), numba.get_num_threads()"
    code = f"set_num_threads({num_threads})\nprint({counts}, numba.threading_layer())"
    assert printed(code, NUMBA_NUM_THREADS="3") == f"{num_threads} {num_threads} workqueue"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted as Linux lists them")
def test_numba_starts_no_thread_that_has_no_part() -> None:
    """It would wake all for every kernel: as in a container with a quota of two CPUs of 64."""
    code = (
        "torch.set_num_threads(2)\nbefore = len(os.listdir('/proc/self/task'))\nset_num_threads(2)\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
        "set_num_threads(3)\nprint(torch.get_num_threads(), numba.get_num_threads())"
    )
    assert printed(code, NUMBA_NUM_THREADS="16") == "2\n3 2"


@pytest.mark.parametrize("num_threads", [0, -1, numba.config.NUMBA_NUM_THREADS + 1])
def test_set_num_threads_names_the_limit(num_threads):
    limit = numba.config.NUMBA_NUM_THREADS
    with pytest.raises(ValueError, match=re.escape(f"{num_threads} threads asked for, 1 to {limit} can be had")):
        set_num_threads(num_threads)
