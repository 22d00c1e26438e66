"""Checks for features of a valid manifest that this version does not implement."""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING, Final

from goodput_core.errors import InputError, SpecError, UnsupportedError
from goodput_core.spec.profiles import (
    SHIPPED_BLOCK_SIZE,
    SHIPPED_PROFILES,
    block_problem,
    is_profile_path,
    require_shipped,
    require_tensor_parallel,
)

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import LLMService, LLMServiceSpec, ModelSpec
    from goodput_core.spec.workloads import EngineSpec

__all__ = [
    "require_block_budget",
    "require_computable",
    "require_local",
    "require_mounted_profile",
    "require_servable",
]

_HUB_MODEL: Final = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


def require_computable(spec: LLMServiceSpec) -> None:
    """Reject real weights (`file://`, `hf://` or `pvc://`) that no engine can compute.

    The content of the folder is checked by the engine.

    Raises:
        SpecError: the path of a `file://` source is not absolute, or the name of an `hf://` source
            is not ORG/NAME.
        UnsupportedError: the model is to be computed on several devices.
    """
    model, runtime = spec.model, spec.engine.runtime
    if model.scheme == "hf" and not _HUB_MODEL.fullmatch(model.name):
        raise SpecError(
            "spec.model.source",
            f"{model.name!r} is not ORG/NAME of a model on the Hub; write for example "
            "hf://Qwen/Qwen3-8B",
        )
    if model.scheme == "file" and not (posixpath.isabs(model.name) or model.name.startswith("~/")):
        raise SpecError(
            "spec.model.source",
            f"{model.name!r} is not an absolute path; write for example file:///models/chat "
            "or file://~/models/chat",
        )
    if spec.engine.tensor_parallel != 1 and not runtime.foreign:
        raise UnsupportedError(
            "spec.engine.tensorParallel",
            f"is {spec.engine.tensor_parallel}, but real models are computed on one device only; "
            "set it to 1",
        )


def require_block_budget(engine: EngineSpec, *, block_size: int, device: str) -> None:
    """Reject a smallest token budget that is less than one KV block.

    Args:
        engine: `spec.engine` of the manifest.
        block_size: tokens per KV block.
        device: what has these blocks, in words.

    Raises:
        SpecError: names the smallest valid budget.
    """
    problem = block_problem(engine.token_budget.min, block_size=block_size, device=device)
    if problem is not None:
        raise SpecError("spec.engine.tokenBudget.min", problem)


def require_local(model: ModelSpec) -> None:
    """Reject a `pvc://` source on a machine that does not mount the claim.

    Raises:
        SpecError: names the options that replace the source.
    """
    if model.scheme == "pvc":
        raise SpecError(
            "spec.model.source",
            f"{model.source} is a volume of a cluster; give the model's path on this "
            "machine with --model-path, or emulate a device profile with --device, one of "
            f"{', '.join(SHIPPED_PROFILES)}",
        )


def require_servable(service: LLMService, *, folders: bool = False) -> None:
    """Reject a manifest that no engine can serve without `--device`.

    A profile given as a path is not checked, because its file may exist only in the engine's pod;
    see `require_mounted_profile`.

    Args:
        service: the service.
        folders: True if the engines are processes of this machine, so that `file://` is accepted.
            False if they are pods, so that `pvc://` is, and `hf://` needs a commit.

    Raises:
        UnsupportedError: a feature is not implemented.
        SpecError: the engines cannot get the model; the device profile does not exist, or has
            another tensor parallelism; the smallest token budget is less than one KV block; pods
            cannot read the gate's trace, history or tokenizer, or have too few CPUs for their HTTP
            processes; the capacity of an engine is given that reports it.
    """
    model, gate = service.spec.model, service.spec.rollout.gate
    engine = service.spec.engine
    if not folders and gate is not None:
        read = {"trace": gate.trace, "history": gate.history, "tokenizer": gate.tokenizer}
        for field, place in read.items():
            if place is not None and place.startswith("file://"):
                raise SpecError(
                    f"spec.rollout.gate.{field}",
                    f"{place} is on one machine, and pods cannot read it; copy it to a "
                    "PersistentVolumeClaim and write pvc://CLAIM/PATH",
                )
    if not folders:
        _require_cpus(engine)
    if engine.runtime.foreign:
        _require_weights(service.spec, folders=folders)
    elif service.spec.control.replica_requests_per1000_seconds is not None:
        raise SpecError(
            "spec.control.replicaRequestsPer1000Seconds",
            "has no effect on Goodput's engine, which reports its step times; remove it",
        )
    if model.scheme in ({"file", "hf"} if folders else {"hf", "pvc"}):
        require_computable(service.spec)
        if not folders and model.scheme == "hf":
            _require_commit(model)
        if not engine.runtime.foreign:
            require_block_budget(
                engine,
                block_size=engine.real_model.tokens_per_block,
                device="the model (spec.engine.realModel.blockSize)",
            )
        return
    if folders:
        require_local(model)
    if model.scheme == "file":
        raise SpecError(
            "spec.model.source",
            f"{model.source} is a folder of one machine, which pods cannot read; copy the model to "
            "a PersistentVolumeClaim and set the source to pvc://CLAIM/PATH",
        )
    if is_profile_path(model.name):
        return
    try:
        require_shipped(model.name)
    except InputError as error:
        raise SpecError("spec.model.source", str(error)) from error
    require_tensor_parallel(
        engine.tensor_parallel, profile=model.name, expected=SHIPPED_PROFILES[model.name]
    )
    require_block_budget(
        engine, block_size=SHIPPED_BLOCK_SIZE, device=f"the device profile {model.name}"
    )


def _require_cpus(engine: EngineSpec) -> None:
    """Reject more HTTP processes than the container's CPUs can run beside the core process.

    The rule is not part of the CustomResourceDefinition: its estimated cost exceeds the limit,
    because a quantity there has no bounded length.
    """
    processes, threads, cpus = (
        engine.http_processes,
        engine.real_model.threads,
        engine.resources.cpus,
    )
    needed = processes + (threads or 1)
    if processes > 1 and cpus is not None and cpus < needed:
        rest = "the core process" if threads is None else f"{threads} threads"
        raise SpecError(
            "spec.engine.httpProcesses",
            f"{processes} HTTP processes and {rest} need {needed} CPUs, but spec.engine.resources "
            f"has {float(cpus):g}; lower it, or raise the CPUs",
        )


def _require_commit(model: ModelSpec) -> None:
    """Reject weights of the Hub that are not those of one commit.

    A tag or a branch can move, and a revision of a service must not change by a start of a pod.
    """
    reason = "because pods start at different times and must get the same weights"
    if model.revision is None:
        raise SpecError(
            "spec.model.revision",
            f"is required for {model.source} in a cluster, {reason}; set it to a commit of the "
            "model",
        )
    if not _COMMIT.fullmatch(model.revision):
        raise SpecError(
            "spec.model.revision",
            f"must be a commit of {model.source} in a cluster (40 hexadecimal digits), {reason}; "
            f"{model.revision!r} is a tag, a branch or a part of a commit",
        )


def _require_weights(spec: LLMServiceSpec, *, folders: bool) -> None:
    """Reject another server's manifest that names no weights, or that is not for a cluster."""
    kind = spec.engine.runtime.kind.value
    if folders:
        raise UnsupportedError(
            "spec.engine.runtime.kind",
            f"{kind} runs in pods of a cluster only; emulate a device with --device, or send "
            "requests to a running server with replay --target URL",
        )
    if spec.model.scheme == "emulated":
        raise SpecError(
            "spec.model.source",
            f"an emulated device cannot be served with runtime kind {kind}; name weights with "
            "hf:// or pvc://",
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
