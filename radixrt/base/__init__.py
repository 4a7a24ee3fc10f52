"""Modules that every folder may import: errors, settings, sampling parameters, sockets, child
processes."""
