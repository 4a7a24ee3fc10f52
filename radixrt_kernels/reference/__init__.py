"""What each kernel computes, in plain torch: short enough to read, and what the kernels are tested against."""
