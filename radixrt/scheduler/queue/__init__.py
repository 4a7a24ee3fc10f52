"""The waiting queue: order, admission, retraction."""
