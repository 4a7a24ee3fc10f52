"""Kernels in Triton: the GPU's versions of what FlashInfer lacks, or of everything where it is not installed.

Each file holds one operation: the kernel, and a function over torch tensors that launches it. With
``TRITON_INTERPRET=1`` set before the import they run on a CPU, which is how they are tested without a GPU.

Triton compiles a kernel anew for arguments that are 1 or a multiple of 16. What changes from step to step (tokens,
pairs) is exempt from that (``do_not_specialize``), or a server would stop to compile while it serves.
"""
