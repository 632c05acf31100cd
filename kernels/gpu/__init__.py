"""The operations in Triton, for NVIDIA and AMD GPUs, in files named as those of the reference."""
