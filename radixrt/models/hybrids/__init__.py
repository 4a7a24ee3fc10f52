"""Models with recurrent layers, which keep a state of each sequence."""
