"""Garbage collection is off until the tests are collected (tests/suite.py): they import much, and
none of it is garbage.

Bytecode is kept, whatever the environment says: the tests start hundreds of processes that import
the same modules.
"""

import gc
import os
import sys

gc.disable()
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
