"""Operations made to be fast on CPUs: numba kernels where they beat PyTorch's own, PyTorch where they do not."""
