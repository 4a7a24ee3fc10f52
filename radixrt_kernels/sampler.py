"""Samples the next token of each row of logits: mask, temperature, top-k, top-p, min-p and the
draw, without a sort. Also normalizes log-probabilities.

It selects the same tokens as ``radixrt.worker.sampling.sampler`` in torch, where the settings are
described.
"""

import torch

from radixrt_kernels import native

if native is not None:
    _sample = native.sample
    _log_sum_exp = native.log_sum_exp
    _log_kept_mass = native.log_kept_mass


def draw_tokens(
    logits: torch.Tensor,
    settings: torch.Tensor,
    positions: torch.Tensor,
    mask: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row.

    Args:
        logits: float32 [rows, vocab]; not changed
        settings: int32 [rows, 6]. Columns: temperature (bits of a float32; 0: greedy), top_k
            (vocab: no limit), top_p (bits of a float32; above 1: no limit), logarithm of min_p
            (bits of a float32; minus infinity: no limit), low half and high half of the seed's key
            of ``radixrt.worker.sampling.noise``.
        positions: int64 [rows], the position of the new token in its sequence
        mask: int64 [n], the masked rows, and int32 [n, ceil(vocab / 32)], one bit per allowed
            token; None: no masks

    Returns:
        (token ids int64 [rows], largest logit of each row float32 [rows]: NaN if a logit of the row
        is not finite)

    Raises:
        ValueError: the shapes or dtypes do not fit.

    Example, greedy, then with a mask that allows only tokens 0 and 1:
        >>> import torch
        >>> logits = torch.tensor([[0.1, 0.7, 0.9, 0.3]])
        >>> floats = torch.tensor([[0.0, 2.0, -torch.inf]]).view(torch.int32)  # temperature, top_p, log min_p
        >>> top_k, key = torch.tensor([[4]], dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
        >>> settings = torch.cat((floats[:, :1], top_k, floats[:, 1:], key), dim=1)
        >>> tokens, largest = draw_tokens(logits, settings, torch.tensor([12]), mask=None)
        >>> tokens
        tensor([2])
        >>> allowed = torch.tensor([[0b0011]], dtype=torch.int32)
        >>> draw_tokens(logits, settings, torch.tensor([12]), mask=(torch.tensor([0]), allowed))[0]
        tensor([1])
    """
    token_ids = torch.empty(len(logits), dtype=torch.int64)
    peaks = torch.empty(len(logits))
    _sample(logits, settings, positions, mask, token_ids, peaks)
    return token_ids, peaks


def log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """Compute the logarithm of the sum of ``e ** logit``. The result of a row does not depend on
    the other rows or on the number of threads; ``torch.logsumexp`` divides a single row among its
    threads.

    Args:
        logits: float32 [rows, vocab]

    Returns:
        float32 [rows]

    Raises:
        ValueError: the shape or dtype does not fit.

    Example:
        >>> import torch
        >>> log_sum_exp(torch.tensor([[0.0, 0.0], [1.0, -torch.inf]]))
        tensor([0.6931, 1.0000])
    """
    output = torch.empty(len(logits))
    _log_sum_exp(logits, output)
    return output


def log_kept_mass(logits: torch.Tensor, rows: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Compute the logarithm of the probability of the allowed tokens under the softmax of some
    rows. The result of a row does not depend on the other rows or on the number of threads.

    Args:
        logits: float32 [rows, vocab]
        rows: int64 [n]
        allowed: int32 [n, ceil(vocab / 32)], one bit per allowed token

    Returns:
        float32 [n], at most 0; minus infinity where no token is allowed

    Raises:
        ValueError: the shapes or dtypes do not fit.

    Example:
        >>> import torch
        >>> allowed = torch.tensor([[0b0011]], dtype=torch.int32)
        >>> log_kept_mass(torch.zeros(1, 4), torch.tensor([0]), allowed).exp()
        tensor([0.5000])
    """
    output = torch.empty(len(rows))
    _log_kept_mass(logits, rows, allowed, output)
    return output
