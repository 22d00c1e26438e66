"""Read JSON files of a model's folder; any file there may be damaged, missing or huge."""

from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING, Any, Final

from goodput_core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["TOKENIZER_FILE", "read_json_object", "tokenizer_problem"]

TOKENIZER_FILE: Final = "tokenizer.json"
# Files of tokenizers that only the transformers library converts.
_OTHER_TOKENIZERS: Final = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")

# A configuration or an index of weights has at most some megabytes.
_MAX_JSON_BYTES: Final = 64 * 1024 * 1024


def tokenizer_problem(has_file: Callable[[str], bool]) -> str | None:
    """Return the reason why the tokenizer of a model cannot be used, for the end of a sentence.

    Args:
        has_file: returns True if the model has a file of this name.

    Returns:
        None if it can be used, or if the model has no tokenizer.
    """
    if has_file(TOKENIZER_FILE):
        return None
    for name in _OTHER_TOKENIZERS:
        if has_file(name):
            return (
                f"the tokenizer in {name} has no {TOKENIZER_FILE}; create it with "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers"
            )
    return None


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file with a JSON object.

    Raises:
        InputError: the file is missing, too large, or not a JSON object.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(f"{path}: is not a regular file; download the model again")
        with path.open("rb") as file:
            data = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise InputError(
            f"{path.parent}: {path.name} cannot be read ({error.strerror}); name a folder with a "
            "model in Hugging Face's format"
        ) from error
    if len(data) > _MAX_JSON_BYTES:
        raise InputError(f"{path}: the file has more than {_MAX_JSON_BYTES} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: must be a JSON object")
    return value
