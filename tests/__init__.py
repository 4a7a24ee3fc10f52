"""Garbage collection is off until the tests are collected (tests/suite.py): they import much, and
none of it is garbage."""

import gc

gc.disable()
