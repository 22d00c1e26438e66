"""The device profiles that ship with the engine, and files with profiles of users.

The operator and `goodput up` do not import the engine, but must reject a profile that the engine
would reject. This module knows names, tensor parallelism and files; the engine reads the content.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from goodput_core.errors import InputError, SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = [
    "SHIPPED_PROFILES",
    "is_profile_path",
    "read_profile_file",
    "require_shipped",
    "require_tensor_parallel",
]

SHIPPED_PROFILES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "llama-3-70b-4xh100": 4,
        "llama-3-70b-4xh100-pp2": 2,
        "llama-3-8b-h100": 1,
        "llama-3-8b-h200": 1,
        "opt-13b-a100": 1,
        "published-70b-table": 4,
        "unit": 1,
    }
)
"""Tensor parallelism of each device profile that ships with the engine.

The operator does not import the engine, so the values are repeated here; a test compares them with
the profiles."""
_FILE_SUFFIXES: Final = (".yaml", ".yml")
_MAX_BYTES: Final = 64 * 1024


def is_profile_path(name: str) -> bool:
    """Return True if a profile is given as a path: it has a slash, or ends in .yaml or .yml."""
    return "/" in name or name.endswith(_FILE_SUFFIXES)


def require_shipped(name: str) -> None:
    """Reject a name that no shipped profile has.

    Raises:
        InputError: lists the shipped profiles.
    """
    if name not in SHIPPED_PROFILES:
        raise InputError(
            f"no device profile is called {name!r}; use one of {', '.join(SHIPPED_PROFILES)}, "
            "or give the path of a profile's YAML file"
        )


def read_profile_file(path: Path) -> bytes:
    """Return the content of a profile's file.

    Raises:
        InputError: the file does not exist, cannot be read, or is too large.
    """
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: is not a file; name the YAML file of a device profile")
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InputError(
            f"{path}: the device profile cannot be read: {error.strerror or error}"
        ) from error
    if len(data) > _MAX_BYTES:
        raise InputError(f"{path}: is too large; a device profile has at most {_MAX_BYTES} bytes")
    return data


def require_tensor_parallel(tensor_parallel: int, *, profile: str, expected: int) -> None:
    """Reject a tensor parallelism that differs from that of the device profile.

    Args:
        tensor_parallel: the value of `spec.engine.tensorParallel`.
        profile: name of the profile.
        expected: tensor parallelism of the profile.

    Raises:
        SpecError: names both values.
    """
    if tensor_parallel != expected:
        raise SpecError(
            "spec.engine.tensorParallel",
            f"is {tensor_parallel}, but the device profile {profile} has {expected}; set it to "
            f"{expected} or use another profile",
        )
