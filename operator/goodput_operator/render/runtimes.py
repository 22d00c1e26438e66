"""Commands of other servers than Goodput's engine: the presets of vLLM and SGLang.

The options of a preset follow the user's arguments, because the last occurrence of an option
applies. `goodput_core.spec.runtime` refuses them in these arguments, but a later version of a
server may have further names for them.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any

from goodput_core.contract import FOLDER_CLAIMS
from goodput_core.spec.choices import RuntimeKind

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import LLMServiceSpec, ModelSpec

__all__ = ["literal", "model_of", "server_command"]


def literal(text: str) -> str:
    """Return the word of a container's command, or the value of a variable, that yields a text.

    Kubernetes replaces $(NAME) in commands and variables by a variable, and $$ by $.
    """
    return text.replace("$", "$$")


def model_of(model: ModelSpec) -> str:
    """Return the Hub's name of the weights, or their folder in the pod, as an argument."""
    name = model.name
    if model.scheme == "pvc":
        name = posixpath.normpath(f"{FOLDER_CLAIMS}/{name}")
    return literal(name)


def server_command(service: str, spec: LLMServiceSpec) -> dict[str, Any]:
    """Return the command and the arguments of the container of another server.

    Args:
        service: name of the service, which clients use as the model's name.
        spec: spec of the service; only `model` and `engine` are read.
    """
    runtime = spec.engine.runtime
    if runtime.kind is RuntimeKind.VLLM:
        return {"command": _vllm(service, spec)}
    if runtime.kind is RuntimeKind.SGLANG:
        return {"command": _sglang(service, spec)}
    # Without a command, the image's entry point runs.
    return {"args": list(runtime.args)} if runtime.args else {}


def _vllm(service: str, spec: LLMServiceSpec) -> list[str]:
    """Return the command of vLLM 0.33.

    Chunked prefill and prefix caching are on by default. docs/runtimes.md has the sources of the
    other values.
    """
    engine = spec.engine
    return [
        *("vllm", "serve", model_of(spec.model)),
        *engine.runtime.args,
        *_revision(spec.model),
        *("--served-model-name", service),
        *("--host", "0.0.0.0"),  # noqa: S104 - all addresses of the pod
        *("--port", str(engine.runtime.serving_port)),
        *("--max-num-batched-tokens", str(engine.token_budget.initial)),
        *("--max-num-seqs", str(engine.max_num_seqs)),
        *("--tensor-parallel-size", str(engine.tensor_parallel)),
    ]


def _sglang(service: str, spec: LLMServiceSpec) -> list[str]:
    """Return the command of SGLang 0.5.

    Decodes wait while it computes a chunk of prompts, so the size of chunks is the trade between
    throughput and latency. Its metrics must be enabled, and it listens on the loopback address by
    default. docs/runtimes.md has the sources.
    """
    engine = spec.engine
    return [
        *("python3", "-m", "sglang.launch_server"),
        *engine.runtime.args,
        *("--model-path", model_of(spec.model)),
        *_revision(spec.model),
        *("--served-model-name", service),
        *("--host", "0.0.0.0"),  # noqa: S104 - all addresses of the pod
        *("--port", str(engine.runtime.serving_port)),
        *("--chunked-prefill-size", str(engine.token_budget.initial)),
        *("--max-running-requests", str(engine.max_num_seqs)),
        *("--tp-size", str(engine.tensor_parallel)),
        "--enable-metrics",
    ]


def _revision(model: ModelSpec) -> tuple[str, ...]:
    return ("--revision", model.revision) if model.scheme == "hf" and model.revision else ()
