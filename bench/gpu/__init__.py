"""What radixrt does on a GPU, beside what the GPU could do: ``python -m bench.gpu``.
docs/internals/gpu.md says how to read it."""
