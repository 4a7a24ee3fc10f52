"""Programs for people who set machines up; docs/gpu.md says when each is needed."""
