"""Groups of sequences that are accepted or refused as a whole: the answers of one HTTP request.

The sequences of a batch come one after the other, and of a long batch the next comes when one has
ended. The first decides for all of them, so that no batch fails in its middle because its last
prompts would wait too long. A group whose wait was forecast wrongly is refused as long as none of
its prompts has begun.
"""

from collections import OrderedDict

from radixrt.messages.sequences import SequenceRequest

MAX_IDLE = 512
"""Accepted groups of which no sequence is in the engine. A further one of them may still come."""


class Group:
    """The sequences of one HTTP request."""

    __slots__ = ("has_begun", "most_output", "name", "num_alive", "num_to_come")

    def __init__(self, most_output: int = 0, name: str = "") -> None:
        """
        Args:
            most_output: tokens of one answer.
            name: by which its other sequences name it.
        """
        self.name = name
        self.most_output = most_output
        self.has_begun = False
        """A prompt of it is planned, or was on another engine."""
        self.num_alive = 0
        """Sequences that wait or run."""
        self.num_to_come = 0
        """Sequences that were sent at once with the first, and have not arrived."""


class Groups:
    """The groups that were accepted."""

    def __init__(self) -> None:
        self._by_name: dict[str, Group] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self.num_to_come = 0
        """Sequences of all groups."""
        self.output_to_come = 0
        """Most tokens of their answers."""

    def knows(self, request: SequenceRequest) -> bool:
        """Whether a sequence of its group was accepted before."""
        return request.group in self._by_name

    def join(self, request: SequenceRequest) -> Group:
        """The group of a sequence that is accepted."""
        group = self._by_name.get(request.group)
        if group is None:
            group = Group(request.sampling.max_tokens or 0, request.group)
            if request.group_size > 1:
                self._by_name[request.group] = group
                self._expect(group, request.group_size - 1)
        else:
            self._idle.pop(request.group, None)
            self._expect(group, -min(group.num_to_come, 1))
        group.num_alive += 1
        group.has_begun |= request.has_begun
        return group

    def leave(self, group: Group) -> None:
        """A sequence has ended. If none is left, those to come may have been dropped before they
        were sent."""
        group.num_alive -= 1
        if group.num_alive:
            return
        self._expect(group, -group.num_to_come)
        if group.name in self._by_name:
            self._idle[group.name] = None
            if len(self._idle) > MAX_IDLE:
                oldest, _ = self._idle.popitem(last=False)
                del self._by_name[oldest]

    def _expect(self, group: Group, change: int) -> None:
        group.num_to_come += change
        self.num_to_come += change
        self.output_to_come += change * group.most_output
