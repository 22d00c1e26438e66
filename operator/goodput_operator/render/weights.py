"""How an engine's pod comes by its weights: volumes, and what the libraries are told.

The operator never reads a token: pods refer to the Secret that holds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import FOLDER_CLAIMS, FOLDER_WEIGHTS

if TYPE_CHECKING:
    from goodput_core.spec.model import ModelSpec

__all__ = ["weights_env", "weights_volumes"]

_CACHE: Final = "goodput-cache"
_CLAIM: Final = "goodput-weights"


def weights_env(model: ModelSpec) -> list[dict[str, Any]]:
    """The variables that tell where to keep weights, with which token to ask, and whether."""
    if model.scheme != "hf":
        return []
    env: list[dict[str, Any]] = [{"name": "HF_HOME", "value": FOLDER_WEIGHTS}]
    if model.token_secret is not None:
        reference = {"name": model.token_secret.name, "key": model.token_secret.key}
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}})
    if model.offline:
        env.append({"name": "HF_HUB_OFFLINE", "value": "1"})
    return env


def weights_volumes(model: ModelSpec) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each volume with where it is mounted."""
    if model.scheme == "pvc":
        claim = model.name.partition("/")[0]
        source = {"claimName": claim, "readOnly": True}
        volume = {"name": _CLAIM, "persistentVolumeClaim": source}
        return [(volume, {"mountPath": f"{FOLDER_CLAIMS}/{claim}", "readOnly": True})]
    if model.scheme != "hf":
        return []
    cache = model.cache
    mount: dict[str, Any] = {"mountPath": FOLDER_WEIGHTS}
    if cache is None:
        return [({"name": _CACHE, "emptyDir": {}}, mount)]
    if cache.sub_path is not None:
        mount["subPath"] = cache.sub_path
    source = {"claimName": cache.claim_name}
    if cache.read_only:
        source = {**source, "readOnly": True}
        mount["readOnly"] = True
    return [({"name": _CACHE, "persistentVolumeClaim": source}, mount)]
