"""From a spec to a grammar, in helper processes with limits of time and memory."""
