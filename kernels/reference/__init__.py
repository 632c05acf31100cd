"""Every operation in plain fp32 PyTorch, on any device: slow and simple, the reference in tests of the others."""
