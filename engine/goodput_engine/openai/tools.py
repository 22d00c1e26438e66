"""`tools`, `tool_choice` and the messages of tools, as a chat template expects them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec

from goodput_engine.openai.bodies import decode_field
from goodput_engine.openai.errors import bad_request

if TYPE_CHECKING:
    from goodput_engine.openai.bodies import ChatBody, ChatMessage

__all__ = ["read_messages", "read_tools"]

_MAX_BYTES: Final = 256 << 10
_MAX_TOOLS: Final = 128
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class _Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _Function


class _CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: _Name
    arguments: str


class _CalledTool(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    function: _CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


_TOOLS: Final = msgspec.json.Decoder(
    Annotated[list[_Tool], msgspec.Meta(max_length=_MAX_TOOLS)] | None
)
_CALLS: Final = msgspec.json.Decoder(
    Annotated[list[_CalledTool], msgspec.Meta(max_length=_MAX_TOOLS)] | None
)
_CHOICE: Final = msgspec.json.Decoder(str | dict[str, msgspec.Raw] | None)
_ARGUMENTS: Final = msgspec.json.Decoder(dict[str, Any])


def read_tools(body: ChatBody) -> list[dict[str, Any]]:
    """Return the tools that the model may call; empty if there are none.

    Raises:
        APIError: 400 naming the field.
    """
    choice = decode_field(body.tool_choice, _CHOICE, "tool_choice") if body.tool_choice else None
    if choice not in {None, "none", "auto"} if isinstance(choice, str | None) else True:
        raise bad_request(
            "tool_choice is not supported by this engine except for auto and none; send one of "
            "them",
            "tool_choice",
        )
    if len(body.tools) > _MAX_BYTES:
        raise bad_request(f"tools is longer than {_MAX_BYTES >> 10} KiB", "tools")
    tools = (decode_field(body.tools, _TOOLS, "tools") if body.tools else None) or []
    if choice == "auto" and not tools:
        raise bad_request("tool_choice is auto, but there are no tools", "tool_choice")
    if tools and body.parallel_tool_calls is False:
        raise bad_request(
            "parallel_tool_calls: false is not supported by this engine; leave it out",
            "parallel_tool_calls",
        )
    for at, tool in enumerate(tools):
        if tool.function.strict:
            field = f"tools[{at}].function.strict"
            raise bad_request(
                f"{field}: true is not supported by this engine, which does not constrain the "
                "arguments of calls; leave it out",
                field,
            )
    return [] if choice == "none" else [msgspec.to_builtins(tool) for tool in tools]


def read_messages(body: ChatBody) -> list[dict[str, Any]]:
    """Return the messages of a chat as variables of a template.

    Raises:
        APIError: 400 naming the message.
    """
    return [_message(message, f"messages[{at}]") for at, message in enumerate(body.messages)]


def _message(message: ChatMessage, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.text}
    field = f"{path}.tool_calls"
    if len(message.tool_calls) > _MAX_BYTES:
        raise bad_request(f"{field} is longer than {_MAX_BYTES >> 10} KiB", field)
    calls = decode_field(message.tool_calls, _CALLS, field) if message.tool_calls else None
    if calls and message.role != "assistant":
        raise bad_request(f"{field} is only valid in a message of the assistant", field)
    if message.content is None and not calls:
        raise bad_request(f"{path}.content is absent or null; send a text", f"{path}.content")
    if calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call, f"{field}[{at}].function.arguments"),
                },
            }
            for at, call in enumerate(calls)
        ]
    if message.role == "tool":
        if not message.tool_call_id:
            raise bad_request(f"{path}.tool_call_id is required", f"{path}.tool_call_id")
        found["tool_call_id"] = message.tool_call_id
    return found


def _arguments(call: _CalledTool, field: str) -> dict[str, Any]:
    try:
        return _ARGUMENTS.decode(call.function.arguments or "{}")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise bad_request(f"{field} must be a JSON object, as a text", field) from error
