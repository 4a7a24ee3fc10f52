"""Notices a process that hangs, and a part of one that has ended."""
