"""`response_format`: the form of the output, as the grammar that the engine core enforces."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from goodput_engine.openai.bodies import decode_field
from goodput_engine.openai.errors import bad_request

if TYPE_CHECKING:
    from goodput_engine.openai.bodies import ChatBody, CompletionBody

__all__ = ["read_grammar"]

FIELD: Final = "response_format"
_MAX_BYTES: Final = 64 << 10
_ANY_OBJECT: Final = '{"type": "object"}'
# Needs a package that only real models need.
_GRAMMARS: Final = "goodput_engine.grammars"


class _Text(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    pass


class _JSONObject(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    pass


class _Schema(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(max_length=64)]
    schema: msgspec.Raw
    description: str | None = None
    strict: bool | None = None


class _JSONSchema(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    json_schema: _Schema


_FORMAT: Final = msgspec.json.Decoder(_Text | _JSONObject | _JSONSchema | None)


def read_grammar(body: CompletionBody | ChatBody) -> str:
    """Return the grammar of the output; empty if the output is free.

    The grammar is compiled once, which takes up to some hundred milliseconds for a large schema.

    Raises:
        APIError: 400 naming `response_format`.
    """
    raw = body.response_format
    if len(raw) > _MAX_BYTES:
        raise bad_request(f"{FIELD} is longer than {_MAX_BYTES >> 10} KiB", FIELD)
    if not len(raw):
        return ""
    value = decode_field(raw, _FORMAT, FIELD)
    if value is None or isinstance(value, _Text):
        return ""
    grammars = import_module(_GRAMMARS)
    try:
        schema = _ANY_OBJECT
        if isinstance(value, _JSONSchema):
            schema = bytes(value.json_schema.schema).decode()
        grammar: str = grammars.json_grammar(schema)
        problem = grammars.grammar_problem(grammar)
    except ValueError as error:
        problem = " ".join(str(error).split())[:200]
    if problem is not None:
        raise bad_request(f"{FIELD}: the JSON schema cannot be used: {problem}", FIELD)
    return grammar
