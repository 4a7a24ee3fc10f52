"""The tensor-parallel layers that models are made of."""
