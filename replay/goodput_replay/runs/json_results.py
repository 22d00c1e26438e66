"""JSON results for other programs: their text, and the JSON Schemas that are shipped with them.

A result is a dataclass with a `version`, and each of its fields has a description. Its schema is
derived from the dataclass, so that both agree. Within one version fields are only added.
"""

from __future__ import annotations

import msgspec

__all__ = ["encode_json", "schema_json"]


def encode_json(result: object) -> bytes:
    """Encode a result as indented JSON with a trailing newline."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"


def schema_json(result: type) -> bytes:
    """Return the JSON Schema of a kind of result, as shipped in its `.schema.json` file."""
    schema = msgspec.json.schema(result)
    return encode_json({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})
