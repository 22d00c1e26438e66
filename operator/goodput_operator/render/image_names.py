"""Names of container images, as container runtimes read them.

Source: https://github.com/distribution/reference (grammar and normalization of references).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["DIGEST", "TagName", "parse_registry", "parse_tag_name", "unpinned"]

DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
"""A digest of the only algorithm that container runtimes use."""
_MAX_NAME: Final = 255
_DEFAULT_REGISTRY: Final = "docker.io"
_DEFAULT_HOST: Final = "registry-1.docker.io"
_DEFAULT_NAMESPACE: Final = "library"
_DEFAULT_TAG: Final = "latest"
_PATH: Final = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_HOST: Final = re.compile(
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*"
    r"|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5})?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TagName:
    """An image that is named by a tag.

    Args:
        registry: host of its registry, with the port if it has one.
        repository: path of the image in the registry.
        tag: the tag.
    """

    registry: str
    repository: str
    tag: str

    def at(self, digest: str) -> str:
        """Return the name of the image with this digest."""
        return f"{self.registry}/{self.repository}@{digest}"


def parse_tag_name(image: str) -> TagName | None:
    """Parse the name of an image; None if it has a digest, or is not a valid name."""
    if "@" in image or len(image) > _MAX_NAME:
        return None
    first, slash, rest = image.partition("/")
    # Without a dot or a port, the first part is a namespace of the default registry.
    is_host = slash and ("." in first or ":" in first or first == "localhost")
    registry, path = (first, rest) if is_host else (_DEFAULT_REGISTRY, image)
    path, colon, tag = path.partition(":")
    if registry == _DEFAULT_REGISTRY and "/" not in path:
        path = f"{_DEFAULT_NAMESPACE}/{path}"
    valid = (
        _HOST.fullmatch(registry)
        and all(_PATH.fullmatch(part) for part in path.split("/"))
        and (not colon or _TAG.fullmatch(tag))
    )
    return TagName(registry=registry, repository=path, tag=tag or _DEFAULT_TAG) if valid else None


def parse_registry(text: str) -> tuple[str, str]:
    """Parse a registry, with an optional scheme, to its name in images and its base URL.

    Raises:
        ValueError: the text is not a host with an optional port and scheme.
    """
    scheme, separator, name = text.rpartition("://")
    if scheme not in {"", "http", "https"} or bool(scheme) != bool(separator):
        raise ValueError(f"{text!r} is not a registry; write for example 'ghcr.io'")
    if not _HOST.fullmatch(name):
        raise ValueError(f"{text!r} is not a registry; write for example 'ghcr.io'")
    host = _DEFAULT_HOST if name == _DEFAULT_REGISTRY else name
    return name, f"{scheme or 'https'}://{host}"


def unpinned(image: str, registries: Collection[str]) -> TagName | None:
    """Return the parts of an image that is named by a tag of one of these registries.

    Args:
        image: name of the image.
        registries: hosts of registries, with the port if they have one.
    """
    name = parse_tag_name(image)
    return name if name is not None and name.registry in registries else None
