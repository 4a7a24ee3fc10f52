"""How near do the CPU kernels come to what the machine can do, and how far ahead of PyTorch are they?"""
