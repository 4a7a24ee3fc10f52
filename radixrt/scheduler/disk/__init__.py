"""The pages on disk: which there are, which are read and written, and who waits for them."""
