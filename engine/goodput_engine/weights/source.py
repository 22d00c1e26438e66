"""The source of a model's weights in a manifest, and the folder of this machine that has them.

A folder is served where it is. A GGUF file is converted first, and a model of the Hugging Face Hub
downloaded; `goodput_engine.weights.fetch` does this in a process of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import ModelSpec

__all__ = ["WeightsSource", "local_folder", "weights_source"]


class WeightsSource(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that must be fetched before they can be loaded.

    Args:
        name: path of a GGUF file, or ORG/NAME on the Hugging Face Hub.
        dtype: data type to which a GGUF file is converted; None for a model of the Hub.
        revision: commit, tag or branch on the Hub; None for the default branch.
        offline: True to use only what is on this machine.
    """

    name: str
    dtype: str | None = None
    revision: str | None = None
    offline: bool = False

    @property
    def title(self) -> str:
        """Name of the source in messages and metrics."""
        return self.name if self.dtype is None else Path(self.name).name


def local_folder(model: ModelSpec) -> Path:
    """Return the path of a `file://` source, where `~` is the home directory."""
    return Path(model.name).expanduser()


def weights_source(model: ModelSpec, *, dtype: str | None) -> WeightsSource | None:
    """Return the weights to fetch; None if the source is a folder, which is served where it is.

    Args:
        model: `spec.model` of a manifest, with a scheme other than `emulated://`.
        dtype: data type of the computation; None for the default, of which a GGUF file is
            converted to float32.
    """
    if model.scheme == "hf":
        return WeightsSource(name=model.name, revision=model.revision, offline=model.offline)
    if model.is_gguf:
        return WeightsSource(name=str(local_folder(model)), dtype=dtype or "float32")
    return None
