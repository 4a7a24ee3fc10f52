"""The scheduler process: owns the radix tree, the pages and the queues; plans every step. Imports
no torch."""
