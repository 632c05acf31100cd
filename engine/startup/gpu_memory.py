"""Computes the GPU memory for the KV cache: the budget less the measured use of everything else."""

import logging
from dataclasses import dataclass

from engine.errors import ConfigError

_GIB = 2**30

_MAX_CONTEXT_BYTES = 3 * _GIB // 2
"""Most memory that the CUDA context and NCCL's buffers take before the engine allocates any; typically 0.3 to 1 GiB."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of a GPU before the engine allocates any.

    Attributes:
        name: name of the GPU, for messages.
        total_bytes: total memory.
        free_bytes: memory not used by other processes.
        utilization: fraction of the total that this engine may use, above 0 and at most 1.
    """

    name: str
    total_bytes: int
    free_bytes: int
    utilization: float

    @property
    def context_bytes(self) -> int:
        """Memory of this process's CUDA context and communication buffers: all that is in use, up to a bound.

        What is in use beyond the bound belongs to other processes.
        """
        return min(self.total_bytes - self.free_bytes, _MAX_CONTEXT_BYTES)

    @property
    def budget_bytes(self) -> int:
        """Total memory that this engine may use."""
        return int(self.total_bytes * self.utilization)

    def check(self) -> None:
        """Checks that the budget is free.

        Raises: ConfigError: other processes use part of it.
        """
        usable_bytes = self.free_bytes + self.context_bytes
        if usable_bytes < self.budget_bytes:
            most = usable_bytes / self.total_bytes
            raise ConfigError(
                f"--gpu-memory-utilization {self.utilization:g} asks for {_gib(self.budget_bytes)} of the "
                f"{_gib(self.total_bytes)} of {self.name}, {_gib(usable_bytes)} is free: stop other processes on "
                f"it, or use at most --gpu-memory-utilization {int(most * 100) / 100:.2f}"
            )

    def check_weights(self, num_bytes: int) -> None:
        """Checks that the weights fit in the budget, before they are read.

        Raises: ConfigError: they do not fit; names the missing memory.
        """
        if num_bytes >= self.budget_bytes:
            raise ConfigError(
                f"the weights take {_gib(num_bytes)}, --gpu-memory-utilization {self.utilization:g} of {self.name} "
                f"leaves {_gib(self.budget_bytes)}: {_gib(num_bytes - self.budget_bytes)} too little. Serve a smaller "
                "--model, use --quantization fp8, or divide it with --tensor-parallel-size"
            )


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Measured memory use besides the KV cache, in bytes.

    Attributes:
        context_bytes: see `GpuMemory`.
        weights_bytes: weights, and memory that libraries keep.
        step_bytes: peak of the largest step: activations, logits, workspaces.
        graphs_bytes: CUDA graphs and their logits.
    """

    context_bytes: int
    weights_bytes: int
    step_bytes: int
    graphs_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of all."""
        return self.context_bytes + self.weights_bytes + self.step_bytes + self.graphs_bytes


def kv_cache_bytes(memory: GpuMemory, use: MemoryUse) -> int:
    """Returns the memory left for the KV cache.

    Raises: ConfigError: none is left; lists the use of memory and the flags to change.
    """
    left = memory.budget_bytes - use.total_bytes
    _log.info(
        "GPU memory: %s of %s may be used; CUDA context %s, weights %s, largest step %s, CUDA graphs %s, KV cache %s",
        _gib(memory.budget_bytes),
        _gib(memory.total_bytes),
        _gib(use.context_bytes),
        _gib(use.weights_bytes),
        _gib(use.step_bytes),
        _gib(use.graphs_bytes),
        _gib(max(0, left)),
    )
    if left <= 0:
        raise ConfigError(
            f"no memory is left for the KV cache: CUDA context {_gib(use.context_bytes)}, weights "
            f"{_gib(use.weights_bytes)}, largest step {_gib(use.step_bytes)} and CUDA graphs {_gib(use.graphs_bytes)} "
            f"take {_gib(-left)} more than the {_gib(memory.budget_bytes)} that --gpu-memory-utilization "
            f"{memory.utilization:g} allows. Raise it, lower --max-num-batched-tokens or --max-num-seqs, or use "
            "--quantization fp8"
        )
    return left


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
