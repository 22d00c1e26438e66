"""The manifest of a local service: reads it, checks its device, and lists its ignored fields."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import yaml

from goodput_core.errors import InputError, SpecError
from goodput_core.process import count_cpus
from goodput_core.spec.manifest import parse_manifest, read_manifest_text
from goodput_core.spec.pod import PodSpec, ResourcesSpec
from goodput_core.spec.profiles import (
    SHIPPED_BLOCK_SIZE,
    SHIPPED_PROFILES,
    is_profile_path,
    memory_problem,
    read_profile_file,
    require_shipped,
    require_tensor_parallel,
)
from goodput_core.spec.rollout import RolloutSpec
from goodput_core.spec.support import require_block_budget, require_servable
from goodput_core.spec.workloads import EngineSpec, RealModelSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_core.spec.llmservice import LLMService
    from goodput_core.spec.workloads import RouterSpec

__all__ = [
    "computes_model",
    "ignored_here",
    "model_options",
    "read_manifest",
    "require_device",
    "use_model_path",
]

# Default share of the memory left after loading, for all replicas of a real model together.
_MEMORY_PERCENT: Final = 50

_WEIGHTS = "an emulated device has no weights"
_PODS = "it applies to pods of a cluster only"


def read_manifest(path: Path) -> tuple[LLMService, str]:
    """Read and validate the one `LLMService` in a YAML or JSON file.

    Returns:
        The service, and the text of its manifest.

    Raises:
        InputError: the file cannot be read, is too large, or is not UTF-8 text or YAML.
        SpecError: a field breaks a rule; the message names file and path.
    """
    text = read_manifest_text(path)
    return parse_manifest(text, source=str(path), yaml=yaml), text


def use_model_path(service: LLMService, path: str) -> LLMService:
    """Return the service with the model in a folder or GGUF file of this machine.

    Raises:
        InputError: the path does not exist.
    """
    model = service.spec.model.at_path(str(Path(path).expanduser().absolute()))
    if not Path(model.name).exists():
        raise InputError(f"--model-path: {path} does not exist; name a folder or a GGUF file")
    return replace(service, spec=replace(service.spec, model=model))


def require_device(service: LLMService, *, device: str | None) -> None:
    """Reject a device profile that the engines could not load, before any of them starts.

    Of a profile's file, only the memory is read here. The engines validate all of it.

    Args:
        service: the service.
        device: profile that replaces `spec.model.source`; None to use the source.

    Raises:
        UnsupportedError: the model cannot be served, and no device replaces it.
        InputError: the profile of `device` does not exist, or its file cannot be read; or the KV
            memory of a file's profile is too small for one request.
        SpecError: the model's folder does not exist; or the profile of `spec.model.source` does
            not, or has another tensor parallelism; or the smallest token budget is less than one KV
            block.
    """
    engine = service.spec.engine
    if device is None:
        require_servable(service, folders=True)
        name = service.spec.model.name
        if service.spec.model.scheme == "file":
            path = Path(name).expanduser()
            if not (path.is_file() if service.spec.model.is_gguf else path.is_dir()):
                raise SpecError(
                    "spec.model.source",
                    f"{name} is neither a folder nor a GGUF file; name a folder with a model in "
                    "Hugging Face's format, or a file whose name ends with .gguf",
                )
        elif service.spec.model.scheme == "emulated" and is_profile_path(name):
            try:
                content = read_profile_file(Path(name))
            except InputError as error:
                raise SpecError("spec.model.source", str(error)) from error
            _require_memory(engine, content, path=name)
        return
    try:
        if is_profile_path(device):
            content = read_profile_file(Path(device))
        else:
            require_shipped(device)
    except InputError as error:
        raise InputError(f"--device: {error}") from error
    if is_profile_path(device):
        _require_memory(engine, content, path=device)
        return
    require_tensor_parallel(
        engine.tensor_parallel, profile=device, expected=SHIPPED_PROFILES[device]
    )
    require_block_budget(
        engine, block_size=SHIPPED_BLOCK_SIZE, device=f"the device profile {device}"
    )


def _require_memory(engine: EngineSpec, content: bytes, *, path: str) -> None:
    """Reject a profile's file whose KV blocks fit neither the token budget nor one request.

    A file without valid numbers is accepted, because the engines report what is wrong with it.
    """
    try:
        numbers = yaml.safe_load(content)["numbers"]
        found = [numbers[name]["value"] for name in ("kv_blocks", "block_size", "max_model_tokens")]
    except (yaml.YAMLError, ValueError, RecursionError, TypeError, LookupError):
        return
    if not all(isinstance(number, int) and number > 0 for number in found):
        return
    kv_blocks, block_size, context_tokens = found
    require_block_budget(engine, block_size=block_size, device=f"the device profile {path}")
    problem = memory_problem(
        kv_blocks=kv_blocks,
        block_size=block_size,
        context_tokens=context_tokens,
        min_budget=engine.token_budget.min,
    )
    if problem is not None:
        raise InputError(
            f"{path}: {problem}; raise kv_blocks of the device profile, or lower max_model_tokens"
        )


def computes_model(service: LLMService, *, device: str | None) -> bool:
    """True if the replicas compute a real model, and no device replaces it."""
    return device is None and service.spec.model.scheme in {"file", "hf"}


def model_options(engine: EngineSpec, replicas: int) -> tuple[str, ...]:
    """Return the options by which replicas of a real model share the memory and cores.

    Args:
        engine: the manifest's settings of a replica.
        replicas: the largest number of replicas.
    """
    cores = count_cpus()
    # One core is for the router and all first HTTP processes.
    free = cores - 1 - replicas * (engine.http_processes - 1)
    threads = engine.real_model.threads or max(1, free // replicas)
    share = engine.real_model.memory_percent or _MEMORY_PERCENT
    percent = max(1, share // replicas)
    return ("--memory-utilization", f"{percent}%", "--threads", str(threads))


def ignored_here(service: LLMService, *, device: str | None, gated: bool = False) -> list[str]:
    """Return a message for each field of the manifest that has no effect on this machine.

    Args:
        service: service of the manifest.
        device: profile that replaces `spec.model.source`; None to use the source.
        gated: True if the gate of the manifest was run.
    """
    emulated = device is not None or service.spec.model.scheme == "emulated"
    messages = [
        f"{path} is ignored: {reason}"
        for path, reason in _ignored_fields(service, emulated=emulated)
        if not (gated and path == "spec.rollout.gate")
    ]
    routers = service.spec.router.replicas
    if routers > 1:
        messages.append(f"spec.router.replicas is {routers}: one router runs locally")
    return messages


def _ignored_fields(service: LLMService, *, emulated: bool) -> Iterator[tuple[str, str]]:
    spec = service.spec
    if spec.model.revision is not None:
        if emulated:
            yield "spec.model.revision", _WEIGHTS
        elif spec.model.scheme == "file":
            yield "spec.model.revision", "a folder has no revisions"
    weights = _WEIGHTS if emulated else _PODS
    if spec.model.cache is not None:
        yield "spec.model.cache", weights
    if spec.model.token_secret is not None:
        yield "spec.model.tokenSecret", _WEIGHTS if emulated else "use HF_TOKEN"
    if spec.model.offline and spec.model.scheme != "hf":
        yield "spec.model.offline", _WEIGHTS if emulated else "the weights are on this machine"
    if emulated and spec.engine.real_model != RealModelSpec():
        yield "spec.engine.realModel", "an emulated device has the memory of its profile"
    if spec.engine.startup_deadline_seconds != EngineSpec().startup_deadline_seconds:
        yield "spec.engine.startupDeadlineSeconds", "use --ready-timeout"
    yield from _ignored_pod_fields("spec.engine", spec.engine)
    yield from _ignored_pod_fields("spec.router", spec.router)
    if spec.router.tenants_secret is not None:
        yield "spec.router.tenantsSecret", "use --tenants"
    if spec.suspend:
        yield "spec.suspend", "a local service runs until it is stopped"
    if spec.control.prometheus is not None:
        yield "spec.control.prometheus", "no server scrapes these processes"
    if spec.rollout.progress_deadline_seconds != RolloutSpec().progress_deadline_seconds:
        yield "spec.rollout.progressDeadlineSeconds", "a local service has no rollouts"
    if spec.rollout.gate is not None:
        yield "spec.rollout.gate", "use --gate OLD"


def _ignored_pod_fields(path: str, part: EngineSpec | RouterSpec) -> Iterator[tuple[str, str]]:
    if part.image is not None:
        yield f"{path}.image", "processes run this installation"
    if part.resources != ResourcesSpec():
        yield f"{path}.resources", "processes have no resource limits"
    if part.drain_seconds != type(part)().drain_seconds:
        yield f"{path}.drainSeconds", "use --grace"
    if part.pod != PodSpec():
        yield f"{path}.pod", _PODS
