"""Blocks of 8-bit weights, known without torch: checkpoints are checked before it is imported."""

BLOCK = 128
"""Rows and columns of a block of weights that shares a scale (DeepSeek-V3, arXiv:2412.19437, section 3.3.2)."""
