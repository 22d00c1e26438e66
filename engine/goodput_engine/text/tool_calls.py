"""The tool calls in an output, in the forms in which common models write them.

A chat template shows the form of its model. Text of another form, or a call that is not valid JSON,
stays text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

__all__ = ["ToolCall", "ToolCallParser", "ToolFormat", "tool_format"]

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_PYTHON_TAG: Final = "<|python_tag|>"


class ToolFormat(StrEnum):
    """Forms of tool calls; the values are in the documentation."""

    HERMES = "hermes"
    """JSON objects with `name` and `arguments` between `<tool_call>` and `</tool_call>`."""
    LLAMA3_JSON = "llama3_json"
    """An output that is nothing but JSON objects with `name` and `parameters`."""
    UNKNOWN = "unknown"
    """The output is not searched for calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a function by the model.

    Args:
        name: the function.
        arguments: its arguments, as a JSON object.
    """

    name: str
    arguments: str


class _ParsedCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"")


_CALL: Final = msgspec.json.Decoder(_ParsedCall)
_SCANNER: Final = json.JSONDecoder()
_BETWEEN_CALLS: Final = "; \t\n"
_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def tool_format(template: str) -> ToolFormat | None:
    """Return the form of the calls that a chat template describes; None if it has no tools."""
    if "tools" not in template:
        return None
    if _OPEN in template:
        return ToolFormat.HERMES
    if _PYTHON_TAG in template or '"parameters"' in template:
        return ToolFormat.LLAMA3_JSON
    return ToolFormat.UNKNOWN


class ToolCallParser:
    """Separates the calls of one output from its text, which arrives in pieces.

    Args:
        form: form of the calls.

    Attributes:
        count: number of calls found so far.
    """

    def __init__(self, form: ToolFormat) -> None:
        self.count = 0
        self._form = form
        self._held = ""
        self._has_calls = self._has_text = False
        self._space = ""

    def feed(self, piece: str, *, last: bool) -> tuple[str, list[ToolCall]]:
        """Return the text that can be sent, and the complete calls.

        Args:
            piece: the next text.
            last: True if it is the end of the output, so that nothing is held back.
        """
        self._held += piece
        if self._form is ToolFormat.HERMES:
            text, calls = self._take_hermes(last=last)
        elif self._form is ToolFormat.LLAMA3_JSON:
            text, calls = self._take_llama3(last=last)
        else:
            text, calls = self._held, []
            self._held = ""
        self.count += len(calls)
        return text, calls

    def _take_hermes(self, *, last: bool) -> tuple[str, list[ToolCall]]:
        pieces: list[str] = []
        calls: list[ToolCall] = []
        while True:
            before, opened, rest = self._held.partition(_OPEN)
            if not opened:
                kept = 0 if last else _partial_suffix(before, _OPEN)
                pieces.append(self._content(before[: len(before) - kept], last=last))
                self._held = before[len(before) - kept :]
                break
            pieces.append(self._content(before))
            inside, closed, after = rest.partition(_CLOSE)
            if not closed and not last:
                self._held = opened + rest
                break
            # A model may end its output without the closing tag.
            call = _read_call(inside)
            if call is None:
                pieces.append(self._content(opened + inside + closed))
            else:
                calls.append(call)
                self._has_calls = True
            self._held = after
        return "".join(pieces), calls

    def _content(self, text: str, *, last: bool = False) -> str:
        """Return the text that can be sent: white space beside calls only if it divides texts."""
        text = self._space + text
        if self._has_calls and not self._has_text:
            text = text.lstrip()
        content = text if last and not self._has_calls else text.rstrip()
        self._space = text[len(content) :]
        self._has_text = self._has_text or bool(content)
        return content

    def _take_llama3(self, *, last: bool) -> tuple[str, list[ToolCall]]:
        held = self._held
        start = held.lstrip().removeprefix(_PYTHON_TAG).lstrip()
        may_call = start.startswith("{") or not start or _PYTHON_TAG.startswith(start)
        if may_call and not last:
            return "", []
        self._held = ""
        calls = _read_calls(start) if start.startswith("{") else []
        if calls:
            return "", calls
        if not last:
            self._form = ToolFormat.UNKNOWN  # an output that begins with text has no calls
        return held, []


def _read_calls(text: str) -> list[ToolCall]:
    """Return calls that are divided by semicolons or lines; none if the text has anything else."""
    calls: list[ToolCall] = []
    at = 0
    while at < len(text):
        try:
            _, end = _SCANNER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        call = _read_call(text[at:end])
        if call is None:
            return []
        calls.append(call)
        rest = text[end:].lstrip(_BETWEEN_CALLS)
        at = len(text) - len(rest)
    return calls


def _read_call(text: str) -> ToolCall | None:
    """Return the call in a JSON object; None if it is not one."""
    try:
        call = _CALL.decode(text.strip())
        arguments = call.arguments or call.parameters
        _OBJECT.decode(arguments)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return ToolCall(name=call.name, arguments=bytes(arguments).decode())


def _partial_suffix(text: str, tag: str) -> int:
    """Return the length of the end of a text that may be the beginning of a tag."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-size:]):
            return size
    return 0
