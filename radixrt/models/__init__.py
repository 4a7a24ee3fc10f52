"""Models by architecture, and the way from a checkpoint folder to one that runs."""
