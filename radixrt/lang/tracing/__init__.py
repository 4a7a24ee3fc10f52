"""Records of what a program did, shown as text or as Chrome trace events."""
