"""Inputs that share a scale in formats of 4-bit floats; without torch, for checks of a checkpoint's configuration."""

MXFP4_GROUP_SIZE = 32
NVFP4_GROUP_SIZE = 16
