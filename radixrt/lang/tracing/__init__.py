"""Records of the calls and tools of a program, shown as text or as Chrome trace events."""
