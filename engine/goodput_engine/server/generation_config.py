"""The sampling defaults of a model, from `generation_config.json` in its folder.

The authors of a model recommend a temperature and limits there, and vLLM applies them too. The ids
that end an output are in the same file, but the engine core reads those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from goodput_core.errors import InputError
from goodput_engine.model_folder import read_json_object
from goodput_engine.openai.sampling_fields import SamplingDefaults

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_sampling_defaults"]

_FILE: Final = "generation_config.json"


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Return the sampling defaults in a model's folder; none if the file does not exist.

    Raises:
        InputError: the file is damaged, or one of its values is invalid in a request.
    """
    path = folder / _FILE
    if not path.is_file():
        return SamplingDefaults()
    config = read_json_object(path)
    try:
        return msgspec.convert(config, SamplingDefaults)
    except msgspec.ValidationError as error:
        problem, _, field = str(error).partition(" - at `$.")
        field = field.rstrip("`")
        expected = problem[:1].lower() + problem[1:]
        raise InputError(
            f"{path}: {field} is {str(config.get(field))[:40]}: {expected}; "
            "correct it, or ignore the file with --sampling-defaults openai"
        ) from error
