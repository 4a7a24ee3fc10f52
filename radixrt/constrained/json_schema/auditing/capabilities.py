"""Reads the table of measured backend behavior for each feature of a JSON schema.

The table is ``capabilities.json``, written by ``python -m bench.capabilities.make_table`` from probes run
through the installed libraries; a test compares the two.
"""

import functools
import json
from collections.abc import Mapping
from enum import StrEnum
from importlib import resources
from typing import Literal

JsonBackend = Literal["llguidance", "xgrammar"]


class Verdict(StrEnum):
    """The measured behaviour of a backend with a feature."""

    EXACT = "exact"
    """Every invalid probe was rejected, every valid one accepted."""
    NARROW = "narrow"
    """Every invalid probe was rejected; some valid value can't be written at all."""
    DROPS = "drops"
    """An invalid probe was accepted."""
    REFUSES = "refuses"
    """No schema with the feature compiles."""
    UNKNOWN = "unknown"
    """Not in the table."""

    @property
    def enforced(self) -> bool:
        """Nothing that violates the schema gets through."""
        return self in (Verdict.EXACT, Verdict.NARROW)


class Capabilities:
    """The table; look up by backend and feature name."""

    def __init__(
        self, versions: Mapping[str, str], verdicts: Mapping[str, Mapping[str, str]]
    ) -> None:
        self.versions = dict(versions)
        """Of the libraries that were measured."""
        self._verdicts = {
            feature: {backend: Verdict(verdict) for backend, verdict in of_backends.items()}
            for feature, of_backends in verdicts.items()
        }

    def verdict(self, backend: str, feature: str) -> Verdict:
        """UNKNOWN for a feature that was never measured."""
        return self._verdicts.get(feature, {}).get(backend, Verdict.UNKNOWN)


@functools.cache
def capabilities() -> Capabilities:
    """The table that the project ships."""
    text = (
        resources.files("radixrt.constrained.json_schema.auditing")
        .joinpath("capabilities.json")
        .read_text("utf-8")
    )
    table = json.loads(text)
    return Capabilities(table["versions"], table["features"])
