"""The operations of layers that each kind of device computes with kernels of its own."""
