"""Triton kernels for GPUs: the operations that FlashInfer lacks, or all operations if FlashInfer is
not installed.

Each file has one operation: the kernel, and a function over torch tensors that launches it. With
``TRITON_INTERPRET=1`` set before the import, the kernels run on a CPU. The tests without a GPU use
this.

Triton compiles a separate version of a kernel for arguments equal to 1 or divisible by 16.
Arguments that change from step to step (tokens, pairs) are excluded from this
(``do_not_specialize``), so that a server does not compile during requests.
"""
