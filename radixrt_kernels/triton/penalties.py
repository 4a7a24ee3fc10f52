"""Repetition, frequency and presence penalties in place, in one pass over the rows with
penalties."""

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def _penalise_kernel(
    logits, rows, counts_rows, repetition, presence, frequency, in_prompt, in_output, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row = tl.load(rows + index)
    counts_row = tl.load(counts_rows + index)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    value_at = logits + row * vocab + token
    value = tl.load(value_at, mask=inside, other=0.0)
    count = tl.load(in_output + counts_row * vocab + token, mask=inside, other=0)
    prompted = tl.load(in_prompt + counts_row * vocab + token, mask=inside, other=0) != 0
    answered = count > 0
    factor = tl.load(repetition + index)
    repeated = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
    value = tl.where(answered | prompted, repeated, value)
    value -= tl.load(frequency + index) * count.to(tl.float32)
    value -= tl.load(presence + index) * answered.to(tl.float32)
    tl.store(value_at, value, mask=inside)


def penalise(
    logits: torch.Tensor,
    rows: torch.Tensor,
    counts_rows: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    in_prompt: torch.Tensor,
    in_output: torch.Tensor,
) -> None:
    """Apply the repetition penalty over prompt and answer, then frequency and presence penalties
    over the answer.

    Args:
        logits: [batch, vocab] float32; the given rows are changed
        rows, counts_rows: [n] int64, indices into logits and into the counts
        repetition, presence, frequency: [n, 1] float32
        in_prompt: [counts, vocab] bool
        in_output: [counts, vocab] int32, occurrences of each token in the answer
    """
    vocab = logits.shape[1]
    _penalise_kernel[(len(rows), triton.cdiv(vocab, BLOCK))](
        logits, rows, counts_rows, repetition, presence, frequency,
        in_prompt.view(torch.uint8), in_output, vocab, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
