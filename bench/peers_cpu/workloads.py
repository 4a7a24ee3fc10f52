"""Makes the workloads of each checkpoint, in texts that mean something to the model."""

from dataclasses import replace

from bench.peers_cpu import documentation, lookups, pseudo_words
from bench.peers_cpu.checkpoints import CheckpointName
from bench.peers_cpu.tasks import Task, Workload
from radixrt.bench.workloads import Conversation, Turn

QUICK_CONVERSATIONS, QUICK_TURNS, QUICK_CHARACTERS, QUICK_OUTPUT = 6, 2, 600, 8


def make_workloads(
    checkpoint: CheckpointName = "random", *, quick: bool = False
) -> dict[str, Workload]:
    """Workloads by letter; the same on every run.

    Args:
        checkpoint: the model that is asked.
        quick: the same in small, which shows that an engine works and nothing else.
    """
    modules = {"gemma": documentation, "padded": lookups}
    workloads = modules.get(checkpoint, pseudo_words).workloads()
    return {w.name: _shortened(w) if quick else w for w in workloads}


def _shortened(workload: Workload) -> Workload:
    """A few of its conversations, with shorter texts; those that are judged keep their lengths."""
    conversations = [
        each
        if isinstance(each, Task)
        else Conversation(
            str(each.context)[:QUICK_CHARACTERS],
            [
                Turn(str(turn.question)[:QUICK_CHARACTERS], min(turn.output_len, QUICK_OUTPUT))
                for turn in each.turns[:QUICK_TURNS]
            ],
        )
        for each in workload.conversations[:QUICK_CONVERSATIONS]
    ]
    return replace(workload, what=f"{workload.what}, shortened", conversations=conversations)
