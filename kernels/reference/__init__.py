"""Every operation in plain fp32 PyTorch: slow, obviously right, on any device. The others are tested against it."""
