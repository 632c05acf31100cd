"""How many weights share a scale in the formats of checkpoints; without torch, for checks of a configuration."""

FP8_BLOCK_SIZE = 128
"""Rows and columns of a block of 8-bit floats (DeepSeek-V3, arXiv:2412.19437, section 3.3.2)."""

MXFP4_GROUP_SIZE = 32
"""Inputs of a group in MXFP4 (OCP Microscaling Formats 1.0, section 5.2)."""

NVFP4_GROUP_SIZE = 16
"""Inputs of a group in NVFP4 (arXiv:2509.25149, section 2)."""
