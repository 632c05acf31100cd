"""The operations in Triton: one set of kernels for NVIDIA and AMD GPUs, with the same file names as their reference."""
