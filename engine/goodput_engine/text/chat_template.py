"""The chat template of a model: a Jinja template from its folder that writes a prompt.

A template can contain any expression, so it runs in Jinja's sandbox, as in transformers. The
sandbox keeps it away from files and code, but bounds neither time nor memory. The server therefore
renders in a process with limits: see `template_process`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from goodput_core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    from jinja2 import nodes
    from jinja2.parser import Parser

__all__ = ["MAX_PROMPT_BYTES", "ChatTemplate"]

MAX_PROMPT_BYTES: Final = 64 << 20
"""Maximum size of a rendered prompt, as UTF-8."""
_MAX_DETAIL: Final = 300


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: text of the template.
        special_tokens: variables of the template, such as `bos_token`.
        now: returns the current local time, for templates that state the date.

    Raises:
        InputError: the source is not a valid template; one sentence without the file's name.
        MemoryError: the process has too little memory for it.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, now: Callable[[], datetime]
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _reject
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except MemoryError:
            raise
        except Exception as error:  # Python, which compiles the result of Jinja, has other types
            raise InputError(f"the chat template is invalid: {_sentence(error)}") from error

    def render(
        self,
        messages: Iterable[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt of a chat, up to the start of the output.

        Args:
            messages: the messages, in order, in OpenAI's form. The arguments of calls of tools are
                objects.
            tools: the tools that the model may call, in OpenAI's form; None without tools.

        Raises:
            InputError: the template rejects the messages, or fails; one sentence.
            MemoryError: the process has too little memory for the template.
        """
        variables = {
            **self._special_tokens,
            "messages": list(messages),
            "add_generation_prompt": True,
            "tools": tools,
            "documents": None,
        }
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(variables):
                size += len(piece.encode("utf-8", "surrogatepass"))
                if size > MAX_PROMPT_BYTES:
                    raise InputError(f"the chat template writes more than {MAX_PROMPT_BYTES} bytes")
                pieces.append(piece)
        except _RejectedMessages as error:
            raise InputError(
                f"the chat template of the model rejects the messages: {_sentence(error)}"
            ) from error
        except (InputError, MemoryError):
            raise
        except Exception as error:  # an expression of the template can raise any type
            raise InputError(
                f"the chat template of the model fails for these messages: {_sentence(error)}"
            ) from error
        return "".join(pieces)


class _RejectedMessages(TemplateError):
    """The template called `raise_exception`."""


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks outputs for training and has no effect here."""

    tags = {"generation"}  # noqa: RUF012 - declared by the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - arguments of templates, as in transformers
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _reject(message: object) -> None:
    raise _RejectedMessages(str(message))


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split())[:_MAX_DETAIL] or type(error).__name__
