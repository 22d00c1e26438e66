"""Checks for features of a valid manifest that this version does not implement."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

from goodput_core.errors import InputError, SpecError, UnsupportedError
from goodput_core.spec.profiles import (
    SHIPPED_PROFILES,
    is_profile_path,
    require_shipped,
    require_tensor_parallel,
)

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import LLMService

__all__ = ["require_mounted_profile", "require_servable", "require_supported"]


def require_supported(service: LLMService) -> None:
    """Reject a manifest with a feature that this version does not implement.

    Raises:
        UnsupportedError: names the field, the feature and the remedy.
    """
    if service.spec.rollout.gate is not None:
        raise UnsupportedError(
            "spec.rollout.gate", "gated rollouts are not implemented yet; remove it"
        )


def require_servable(service: LLMService) -> None:
    """Reject a manifest that no engine can serve without `--device`.

    A profile given as a path is not checked, because its file may exist only in the engine's pod;
    see `require_mounted_profile`.

    Raises:
        UnsupportedError: a feature is not implemented (see `require_supported`), or the model has
            real weights.
        SpecError: the device profile does not exist, or has another tensor parallelism.
    """
    require_supported(service)
    model = service.spec.model
    if model.scheme != "emulated":
        raise UnsupportedError(
            "spec.model.source",
            f"torch execution is not implemented yet, so {model.source} cannot be served; emulate "
            "a device profile instead: emulated:// followed by one of "
            f"{', '.join(SHIPPED_PROFILES)}",
        )
    if is_profile_path(model.name):
        return
    try:
        require_shipped(model.name)
    except InputError as error:
        raise SpecError("spec.model.source", str(error)) from error
    require_tensor_parallel(
        service.spec.engine.tensor_parallel,
        profile=model.name,
        expected=SHIPPED_PROFILES[model.name],
    )


def require_mounted_profile(service: LLMService) -> None:
    """Reject a device profile whose path is not in a volume that the engines' pods mount.

    The image has only the shipped profiles. Without a mount, every pod would fail at its start.

    Raises:
        SpecError: names the path and the remedy.
    """
    model = service.spec.model
    if model.scheme != "emulated" or not is_profile_path(model.name):
        return
    path = posixpath.normpath(model.name)
    for mount in service.spec.engine.pod.volume_mounts:
        folder = posixpath.normpath(mount.mount_path)
        if path == folder or path.startswith(f"{folder.rstrip('/')}/"):
            return
    raise SpecError(
        "spec.model.source",
        f"no mount of spec.engine.pod.volumeMounts contains the device profile {model.name!r}; "
        "mount a volume that has the file and give its absolute path, for example "
        "emulated:///profiles/mine.yaml, or use one of "
        f"{', '.join(SHIPPED_PROFILES)}",
    )
