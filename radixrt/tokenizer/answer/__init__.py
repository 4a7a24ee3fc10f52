"""From token ids to an answer's text, reasoning and tool calls."""
