"""The tokenizer of a model, from its folder in Hugging Face's format.

`tokenizers` reads `tokenizer.json` in a fraction of a second. The import of transformers would take
seconds and needs torch. Only the files of the folder are read, and none of them is executed except
for the chat template, in a sandbox and in a process of its own.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from tokenizers import Tokenizer

from goodput_core.errors import InputError
from goodput_engine.model_folder import TOKENIZER_FILE, read_json_object, tokenizer_problem
from goodput_engine.text.detokenizer import Detokenizer, TokenTexts
from goodput_engine.text.template_process import TemplateProcess
from goodput_engine.text.tool_calls import tool_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from goodput_engine.text.tool_calls import ToolFormat

__all__ = ["ModelTokenizer", "load_model_tokenizer", "read_tokenizer_file"]

_MAX_TOKENIZER_BYTES: Final = 256 << 20
_CONFIG: Final = "tokenizer_config.json"
_SPECIAL_TOKENS: Final = "special_tokens_map.json"
_TEMPLATE: Final = "chat_template.jinja"
_MAX_TEMPLATE_BYTES: Final = 1 << 20
# A text with more characters per token than this one is rare, so that the start of a text usually
# proves that the complete text has too many tokens.
_LONG_TOKEN: Final = 8
_CUT_WORD: Final = 1_024
"""Tokens by which the start of a text may exceed the complete text: its last word is cut."""


_Template = Annotated[str, msgspec.Meta(max_length=_MAX_TEMPLATE_BYTES)]


class _NamedTemplate(msgspec.Struct):
    name: str
    template: _Template


_Templates = _Template | list[_NamedTemplate] | None
_DEFAULT_TEMPLATE: Final = "default"


def load_model_tokenizer(
    folder: Path, *, now: Callable[[], datetime] | None = None
) -> ModelTokenizer | None:
    """Load the tokenizer of a model.

    Args:
        folder: the model's folder.
        now: returns the local time for chat templates; None for the time of this machine.

    Returns:
        None if the folder has no tokenizer, so that the model serves token ids only.

    Raises:
        InputError: a file of the tokenizer is damaged, or of a format that is not supported.
        InternalError: the process of the chat template cannot be started.
    """
    problem = tokenizer_problem(lambda name: (folder / name).is_file())
    if problem is not None:
        raise InputError(f"{folder}: {problem}")
    if not (folder / TOKENIZER_FILE).is_file():
        return None
    tokenizer = read_tokenizer_file(folder / TOKENIZER_FILE)
    config = _read_optional(folder / _CONFIG)
    special_tokens = _special_tokens({**_read_optional(folder / _SPECIAL_TOKENS), **config})
    source = _template_source(folder, config)
    try:
        texts = TokenTexts(tokenizer)
    except InputError as error:
        raise InputError(
            f"{folder / TOKENIZER_FILE}: its decoder is not supported: {error}"
        ) from error
    try:
        template = (
            None
            if source is None
            else TemplateProcess(source, special_tokens, now=now or _local_time)
        )
    except InputError as error:
        raise InputError(f"{folder}: {error}") from error
    tools = None if source is None else tool_format(source)
    return ModelTokenizer(tokenizer, texts, template, tools)


def read_tokenizer_file(path: Path) -> Tokenizer:
    """Read a `tokenizer.json`, without its truncation and padding.

    Raises:
        InputError: the file is unreadable, too large, or not a tokenizer.
    """
    try:
        size = path.stat().st_size
        if size > _MAX_TOKENIZER_BYTES:
            raise InputError(f"{path}: {size} bytes are too large for a tokenizer")
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or 'cannot be read'}") from error
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the package raises no narrower class
        why = " ".join(str(error).split())[:120]
        raise InputError(
            f"{path}: not a {TOKENIZER_FILE} of Hugging Face's tokenizers ({why})"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class ModelTokenizer:
    """Converts between text and token ids. All methods may be called from several threads.

    Args:
        tokenizer: the tokenizer.
        texts: the bytes of its tokens.
        template: the chat template; None if the model has none.
        tools: form of the model's calls of tools; None if the template has no tools.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: TokenTexts,
        template: TemplateProcess | None,
        tools: ToolFormat | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._template = template
        self.tools = tools

    @property
    def has_chat_template(self) -> bool:
        """True if `encode_chat` is possible."""
        return self._template is not None

    def encode(self, text: str, *, limit: int | None = None) -> list[int]:
        """Return the token ids of a text, with the special tokens that the model expects.

        Args:
            text: any text.
            limit: number of tokens that the caller accepts. The result for a text with more tokens
                may end anywhere after them. None to encode the complete text.

        Raises:
            InputError: the text has a lone surrogate, or the vocabulary cannot represent it.
        """
        return self._encode(text, limit, special_tokens=True)

    def encode_chat(
        self, messages: Iterable[tuple[str, str]], *, limit: int | None = None
    ) -> list[int]:
        """Return the token ids of a chat, up to the start of the output.

        The chat template writes the special tokens.

        Args:
            messages: role and content, in order.
            limit: see `encode`.

        Raises:
            InputError: the model has no chat template, or it rejects the messages.
        """
        chat = [{"role": role, "content": content} for role, content in messages]
        return self.encode_messages(chat, limit=limit)

    def encode_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        limit: int | None = None,
    ) -> list[int]:
        """Return the token ids of a chat with tools; see `ChatTemplate.render`.

        Raises:
            InputError: the model has no chat template, or it rejects the messages.
            InternalError: the process of the chat template was ended from outside.
        """
        if self._template is None:
            raise InputError(
                "the model has no chat template; send a prompt to /v1/completions instead"
            )
        return self._encode(self._template.render(messages, tools), limit, special_tokens=False)

    def detokenizer(self, *, continues: bool = False) -> Detokenizer:
        """Return a detokenizer for one output; see `Detokenizer`."""
        return Detokenizer(self._texts, continues=continues)

    def token_label(self, token_id: int, *, first: bool) -> bytes | str:
        """Return the bytes of a token, or the name of a token that is not part of the text.

        Args:
            token_id: the token.
            first: True at the start of a text, where some tokenizers remove a space.
        """
        if self._texts.is_shown(token_id):
            return self._texts.first(token_id) if first else self._texts.later(token_id)
        return self._tokenizer.id_to_token(token_id) or f"token_id:{token_id}"

    def _encode(self, text: str, limit: int | None, *, special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text has a lone surrogate at character {error.start}, which is not a valid "
                "character; send valid Unicode"
            ) from error
        if limit is not None:
            start = text[: _LONG_TOKEN * (limit + _CUT_WORD)]
            if len(start) < len(text):
                ids = self._encode_valid(start, special_tokens=special_tokens)
                if len(ids) > limit + _CUT_WORD:
                    return ids
        return self._encode_valid(text, special_tokens=special_tokens)

    def _encode_valid(self, text: str, *, special_tokens: bool) -> list[int]:
        try:
            # Unlike `encode`, this function runs beside other threads.
            (encoding,) = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=special_tokens
            )
        except Exception as error:  # the package raises no narrower class
            detail = " ".join(str(error).split())[:200]
            raise InputError(f"the tokenizer of the model rejects the text: {detail}") from error
        return list(encoding.ids)


def _local_time() -> datetime:
    return datetime.now().astimezone()


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens that a chat template can use, such as `bos_token`."""
    found: dict[str, str] = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    """Return the chat template: a file of its own, or the default one of the configuration."""
    path = folder / _TEMPLATE
    if path.is_file():
        try:
            if path.stat().st_size > _MAX_TEMPLATE_BYTES:
                raise InputError(f"{path}: the chat template has over {_MAX_TEMPLATE_BYTES} bytes")
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: the chat template cannot be read: {error}") from error
    try:
        found: str | list[_NamedTemplate] | None = msgspec.convert(
            config.get("chat_template"), _Templates
        )
    except msgspec.ValidationError as error:
        raise InputError(
            f"{folder / _CONFIG}: chat_template must be a text of at most {_MAX_TEMPLATE_BYTES} "
            "characters, or a list of objects with a name and such a text as template"
        ) from error
    if isinstance(found, list):
        return next((one.template for one in found if one.name == _DEFAULT_TEMPLATE), None)
    return found
