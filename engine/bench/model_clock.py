"""Times the model in each step: the compiled step, from the batch's tensors to its logits.

The rest of a step is scheduling, packing the batch, sampling and KV cache accounting.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch

from kernels.cpu.ops import CpuOps
from kernels.interface import Step
from kernels.metadata import StepInputs


class ModelClock:
    """Records the duration of each step of the model."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def take(self) -> list[float]:
        """Returns the seconds of every step since the last call."""
        seconds, self._seconds = self._seconds, []
        return seconds

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Attaches this clock to engines built inside the block, for their lifetime."""
        compile_step = CpuOps.compile_step

        def compile_timed(ops: CpuOps, step: Step, largest: StepInputs, *sizes: Any, **options: Any) -> Step:
            return self._timed(compile_step(ops, step, largest, *sizes, **options))

        with patch.object(CpuOps, "compile_step", compile_timed):
            yield

    def _timed(self, step: Step) -> Step:
        def timed(inputs: StepInputs) -> torch.Tensor:
            started_s = time.perf_counter()
            logits = step(inputs)
            self._seconds.append(time.perf_counter() - started_s)
            return logits

        return timed
