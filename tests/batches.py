"""Reads the results of a step."""

from radixrt.messages.answers import AnswerReport
from radixrt.messages.sequences import TokenBatch


def started(batch: TokenBatch) -> dict[int, AnswerReport]:
    """The first reports of the sequences that have begun."""
    return {i: one.started for i, one in batch.outputs.items() if one.started is not None}


def finished(batch: TokenBatch) -> dict[int, AnswerReport]:
    """The last reports of the sequences that have ended."""
    return {i: one.finished for i, one in batch.outputs.items() if one.finished is not None}
