"""CPU operations: numba kernels where they are faster than PyTorch, PyTorch elsewhere."""
