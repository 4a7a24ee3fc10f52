"""What can go wrong between a constraint and its masks?"""

from radixrt.errors import RadixrtError


class CannotCompile(RadixrtError):
    """No backend can hold an answer to this; the message says what to change."""


class GrammarExhausted(RadixrtError):
    """A matcher ran into a limit of its library in the middle of an answer: nothing can be said of what may
    come next, so the answer must end with an error."""
