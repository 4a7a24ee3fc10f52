"""How do request structs appear in /openapi.json? FastAPI sees only raw bodies; msgspec knows their types."""

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI


def describe_bodies(app: FastAPI, bodies: Mapping[str, type[msgspec.Struct]]) -> None:
    """Add the JSON schema of each path's request body to the app's description."""
    schemas, components = msgspec.json.schema_components(
        bodies.values(), ref_template="#/components/schemas/{name}"
    )
    description = app.openapi()
    description.setdefault("components", {}).setdefault("schemas", {}).update(components)
    for path, schema in zip(bodies, schemas, strict=True):
        content: dict[str, Any] = {"application/json": {"schema": schema}}
        description["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
