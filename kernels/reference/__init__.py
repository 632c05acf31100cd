"""Every operation in plain fp32 PyTorch: slow, obviously right, on any device. The other implementations are tested against it."""
