"""Compares the CPU kernels with the machine's limits and with PyTorch."""
