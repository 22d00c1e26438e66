"""The chat template of a model: a Jinja template from its folder that writes a prompt.

A template can contain any expression, so it runs in Jinja's sandbox, as in transformers. The
sandbox does not bound loops. The rendering therefore counts the iterations of loops and the calls,
also those of recursive macros, and ends after a fixed number of them. The result does not depend
on the speed of the machine.

A template is as trusted as the weights beside it. The limits are for mistakes in templates, and for
messages that make a template slow. The texts and lists that operators create have a limit for each
rendering, and widths of padding are small. One call of a filter or a method, such as `replace`, can
still create a large text.
"""

from __future__ import annotations

import json
import re
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import jinja2
from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from goodput_core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime

    from jinja2.parser import Parser
    from jinja2.runtime import Context

__all__ = ["ChatTemplate"]

_MAX_STEPS: Final = 200_000
_MAX_CHARACTERS: Final = 64 << 20
_MAX_PRODUCT: Final = 1 << 20
_MAX_EXPONENT: Final = 1_000
_MAX_CREATED: Final = 512 << 20
_MAX_WIDTH: Final = 100
_CHARACTERS_PER_ITEM: Final = 8  # in memory
# Filters and methods of texts whose arguments are widths or numbers of columns.
_WIDTH_FILTERS: Final = ("batch", "center", "indent", "slice", "tojson")
_WIDTH_METHODS: Final = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
_FORMAT_METHODS: Final = frozenset({"format", "format_map"})
# Widths of more than two digits, and widths that are arguments.
_PERCENT_WIDTH: Final = re.compile(r"%[^a-zA-Z%]*(?:\d{3}|\*)")
_FORMAT_WIDTH: Final = re.compile(r":[^{}]*(?:\d{3}|\{)")
_MAX_DETAIL: Final = 300
_WIDE: Final = f"it pads a text to more than {_MAX_WIDTH} characters, or to a computed width"
_STEPS: Final = "goodput_steps"
_COUNTED: Final = "goodput_counted"
_CREATED: Final = "goodput_created"


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: text of the template.
        special_tokens: variables of the template, such as `bos_token`.
        now: returns the current local time, for templates that state the date.

    Raises:
        InputError: the source is not a valid template; one sentence without the file's name.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, now: Callable[[], datetime]
    ) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        for name in _WIDTH_FILTERS:
            environment.filters[name] = _with_small_widths(environment.filters[name])
        environment.filters["format"] = _with_small_formats(environment.filters["format"])
        environment.filters[_COUNTED] = _count_items
        environment.filters[_CREATED] = _count_created
        environment.globals["raise_exception"] = _reject
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._special_tokens = dict(special_tokens)
        try:
            tree = _CountedOperators().visit(environment.parse(source))
            tree.set_environment(environment)
            for loop in list(tree.find_all(nodes.For)):
                counted = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
                loop.iter = counted.set_environment(environment)
            self._template = environment.from_string(tree)
        except (TemplateError, RecursionError, ValueError, MemoryError) as error:
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
        """
        variables = {
            **self._special_tokens,
            "messages": list(messages),
            "add_generation_prompt": True,
            "tools": tools,
            "documents": None,
            _STEPS: _StepCounter(),
        }
        pieces: list[str] = []
        characters = 0
        try:
            for piece in self._template.generate(variables):
                characters += len(piece)
                if characters > _MAX_CHARACTERS:
                    raise InputError(
                        f"the chat template writes more than {_MAX_CHARACTERS} characters"
                    )
                pieces.append(piece)
        except _RejectedMessages as error:
            raise InputError(
                f"the chat template of the model rejects the messages: {_sentence(error)}"
            ) from error
        except InputError:
            raise
        except Exception as error:  # an expression of the template can raise any type
            raise InputError(
                f"the chat template of the model fails for these messages: {_sentence(error)}"
            ) from error
        return "".join(pieces)


class _RejectedMessages(TemplateError):
    """The template called `raise_exception`."""


class _StepCounter:
    """Counts the loop iterations, the calls and the created characters of one rendering."""

    __slots__ = ("_left", "_left_characters")

    def __init__(self) -> None:
        self._left = _MAX_STEPS
        self._left_characters = _MAX_CREATED

    def take(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise SecurityError(f"it takes more than {_MAX_STEPS} loop iterations and calls")

    def create(self, size: int) -> None:
        self._left_characters -= size
        if self._left_characters < 0:
            raise SecurityError(
                f"its operators create more than {_MAX_CREATED} characters of texts and lists"
            )


class _CountedItems:
    """The items of a loop; each one that is taken counts as a step."""

    __slots__ = ("_items", "_steps")

    def __init__(self, items: Any, steps: _StepCounter) -> None:
        self._items = items
        self._steps = steps

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._steps.take()
            yield item


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers, which also counts calls and bounds products."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        context.parent[_STEPS].take()
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps `format`
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            name = method.__name__
            if name in _WIDTH_METHODS:
                _require_small_widths(args, kwargs)
            elif name in _FORMAT_METHODS and _FORMAT_WIDTH.search(text):
                raise SecurityError(_WIDE)
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (_is_small(left) and _is_small(right)):
            raise SecurityError("it computes a power of large numbers")
        if operator == "%" and isinstance(left, str) and _PERCENT_WIDTH.search(left):
            raise SecurityError(_WIDE)
        for text, count in ((left, right), (right, left)):
            is_repeated = isinstance(count, int) and hasattr(text, "__len__")
            if is_repeated and len(text) * count > _MAX_PRODUCT:
                raise SecurityError(f"it repeats a text to more than {_MAX_PRODUCT} characters")
        return super().call_binop(context, operator, left, right)


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks outputs for training and has no effect here."""

    tags = {"generation"}  # noqa: RUF012 - declared by the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CountedOperators(NodeTransformer):
    """Counts the sizes of the results of operators that make texts and lists longer."""

    def _count(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        return nodes.Filter(node, _CREATED, [], [], None, None, lineno=node.lineno)

    visit_Add = visit_Concat = visit_Mod = visit_Mul = _count  # noqa: N815 - names of Jinja


@pass_context
def _count_created(context: Context, value: Any) -> Any:
    if isinstance(value, str):
        context.parent[_STEPS].create(len(value))
    elif isinstance(value, list | tuple):
        context.parent[_STEPS].create(len(value) * _CHARACTERS_PER_ITEM)
    return value


def _with_small_widths(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that rejects large numbers and long texts among its arguments."""

    @wraps(function)
    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        _require_small_widths(args, kwargs)
        return function(value, *args, **kwargs)

    return checked


def _with_small_formats(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter `format` without large widths."""

    @wraps(function)
    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        if _PERCENT_WIDTH.search(str(value)):
            raise SecurityError(_WIDE)
        return function(value, *args, **kwargs)

    return checked


def _require_small_widths(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if (isinstance(value, int) and value > _MAX_WIDTH) or (
            isinstance(value, str) and len(value) > _MAX_WIDTH
        ):
            raise SecurityError(_WIDE)


@pass_context
def _count_items(context: Context, items: Any) -> Any:
    if isinstance(items, jinja2.Undefined):
        return items
    return _CountedItems(items, context.parent[_STEPS])


def _is_small(number: Any) -> bool:
    return isinstance(number, int | float) and abs(number) <= _MAX_EXPONENT


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
