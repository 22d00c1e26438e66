"""The device profiles that ship with the engine, and files with profiles of users.

The operator and `goodput up` do not import the engine, but must reject a profile that the engine
would reject. This module knows names, tensor parallelism, files, and what the memory of a device
must hold; the engine reads the content.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from goodput_core.errors import InputError, SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = [
    "SHIPPED_BLOCK_SIZE",
    "SHIPPED_PROFILES",
    "block_problem",
    "is_profile_path",
    "memory_problem",
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
SHIPPED_BLOCK_SIZE: Final = 16
"""Tokens per KV block of every shipped profile; a test compares it with the profiles."""
_FILE_SUFFIXES: Final = (".yaml", ".yml")
_MAX_BYTES: Final = 64 * 1024
# Tokens of a small request: a prompt of 256 tokens, and the 256 output tokens that a scheduling
# policy expects before outputs have ended.
_REQUEST_TOKENS: Final = 512


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


def block_problem(budget: int, *, block_size: int, device: str) -> str | None:
    """Return the error of a token budget that is less than one KV block; None if it is not.

    Args:
        budget: tokens per step.
        block_size: tokens per KV block.
        device: what has these blocks, in words.
    """
    if budget >= block_size:
        return None
    return f"is {budget}, less than one KV block of {device}; set at least {block_size}"


def memory_problem(
    *, kv_blocks: int, block_size: int, context_tokens: int, min_budget: int
) -> str | None:
    """Return the error of KV memory that is too small for one request; None if it suffices.

    A server does not know its requests in advance. It must hold one of 512 tokens, one whose prompt
    fills a step of the smallest token budget, or one that fills the context if that is shorter.

    Args:
        kv_blocks: number of KV blocks.
        block_size: tokens per KV block.
        context_tokens: limit of prompt and output together.
        min_budget: the value of `spec.engine.tokenBudget.min`.
    """
    held, needed = kv_blocks * block_size, max(_REQUEST_TOKENS, min_budget)
    # The last output token needs no KV memory.
    if held + 1 >= min(context_tokens, needed):
        return None
    return (
        f"{kv_blocks} KV blocks of {block_size} tokens hold {held} tokens, too few for one "
        f"request; the memory must hold {needed}, or the complete context if that is shorter"
    )
