"""What a service's objects are called: at most 63 characters, with the service's own 40."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Names"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of one service's objects.

    Args:
        service: the LLMService's; also that of the Service which clients talk to.
    """

    service: str

    @property
    def router(self) -> str:
        """Deployment, PodDisruptionBudget, ServiceAccount, Role and RoleBinding of the routers."""
        return f"{self.service}-router"

    @property
    def engines(self) -> str:
        """The headless Service in which routers find engines, and the PodDisruptionBudget."""
        return f"{self.service}-engines"

    @property
    def config(self) -> str:
        """The ConfigMap of manifests and limits."""
        return f"{self.service}-config"

    def engine_revision(self, digest: str) -> str:
        """ControllerRevision and Deployment of one revision of the engines."""
        return f"{self.service}-{digest}"

    def router_revision(self, digest: str) -> str:
        """ControllerRevision of one revision of the routers."""
        return f"{self.service}-router-{digest}"
