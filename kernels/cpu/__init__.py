"""CPU operations: numba kernels where they are faster than PyTorch, PyTorch elsewhere."""

import kernels.cpu.cpu_features  # noqa: F401 - tells numba of an ARM CPU's features before it compiles anything
