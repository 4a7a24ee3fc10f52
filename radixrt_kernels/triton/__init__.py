"""Kernels in Triton: the GPU's versions of what FlashInfer lacks, or of everything where it is not installed.

Each file holds one operation: the kernel, and a function over torch tensors that launches it. With
``TRITON_INTERPRET=1`` set before the import they run on a CPU, which is how they are tested without a GPU.
"""
