"""Stacks of matrices as a mixture of experts has them, for tests of what multiplies by them."""

from torch import Tensor, nn

from radixrt.layers.matrix import DenseMatrix, MatrixStack


def dense_stack(weights: Tensor) -> MatrixStack:
    """A loaded one of plain weights [count, rows, columns]."""
    stack = MatrixStack(*weights.shape)
    stack.allocate(DenseMatrix)
    stack.matrix.weight = nn.Parameter(weights.flatten(0, 1), requires_grad=False)
    return stack
