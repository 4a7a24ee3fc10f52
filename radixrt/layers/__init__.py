"""The building blocks of every model, tensor-parallel from birth."""
