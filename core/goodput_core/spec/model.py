"""`spec.model`: which weights are served, and how a pod comes by them."""

from __future__ import annotations

from dataclasses import dataclass

from goodput_core.spec.fields import SUBDOMAIN, SUBDOMAIN_HINT, spec_field

__all__ = ["ModelCacheSpec", "ModelSpec", "TokenSecretSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCacheSpec:
    """A PersistentVolumeClaim that keeps downloaded weights, so that a new pod finds them."""

    claim_name: str = spec_field(
        "The PersistentVolumeClaim; replicas on several nodes need one that many may mount.",
        max_length=253,
        pattern=SUBDOMAIN,
        pattern_hint=SUBDOMAIN_HINT,
    )
    sub_path: str | None = spec_field(
        "The folder of the volume that is the cache; its root when absent.",
        default=None,
        max_length=512,
        pattern=r"^[^/\x00-\x1f\x7f][^\x00-\x1f\x7f]*$",
        pattern_hint="be a path without a leading slash",
    )
    read_only: bool = spec_field(
        "Mount it read-only: nothing is added to what it holds.", default=False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSecretSpec:
    """Where the token for the weights stands; only the pod reads it."""

    name: str = spec_field(
        "The Secret, in the service's namespace.",
        max_length=253,
        pattern=SUBDOMAIN,
        pattern_hint=SUBDOMAIN_HINT,
    )
    key: str = spec_field(
        "The key of the Secret's data.",
        default="token",
        max_length=253,
        pattern=r"^[-._a-zA-Z0-9]+$",
        pattern_hint="hold letters, digits, '-', '_' and '.' only",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Which weights are served."""

    source: str = spec_field(
        "Where the weights are: hf://ORG/NAME, pvc://CLAIM/PATH, file://PATH or emulated://PROFILE.",
        max_length=512,
        pattern=r"^(hf|pvc|file|emulated)://[^\x00-\x20\x7f]+$",
        pattern_hint="begin with hf://, pvc://, file:// or emulated:// and name a model",
    )
    revision: str | None = spec_field(
        "The commit or tag of the weights.", default=None, min_length=1, max_length=128
    )
    cache: ModelCacheSpec | None = spec_field(
        "A volume that keeps downloaded weights; without one every pod downloads its own. Ignored "
        "outside a cluster.",
        default=None,
    )
    token_secret: TokenSecretSpec | None = spec_field(
        "The Secret with the token that hf:// asks for. Ignored outside a cluster.", default=None
    )
    offline: bool = spec_field(
        "Take weights from the cache and volumes alone, never from the network. Ignored outside a "
        "cluster.",
        default=False,
    )

    @property
    def scheme(self) -> str:
        """The part of `source` before `://`."""
        return self.source.partition("://")[0]

    @property
    def name(self) -> str:
        """The part of `source` after `://`."""
        return self.source.partition("://")[2]
