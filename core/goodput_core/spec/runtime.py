"""`spec.engine.runtime`: the server that the engines' pods run, Goodput's own or another one.

A preset for vLLM or SGLang turns fields of the manifest into arguments of the server. The arguments
that a preset sets are declared here, because a manifest must not set them a second time; the
operator renders them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from goodput_core.declaration import Cel, CrossFieldRule, spec_field
from goodput_core.spec.choices import RuntimeKind

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping

__all__ = ["PRESET_OPTIONS", "REFUSED_OPTIONS", "RuntimeSpec"]

_MAX_ARGS: Final = 64
_MAX_ARG: Final = 4096
_PRESETS: Final = (RuntimeKind.VLLM, RuntimeKind.SGLANG)

PRESET_OPTIONS: Final[Mapping[RuntimeKind, tuple[str, ...]]] = {
    # Of `vllm serve` 0.33.
    RuntimeKind.VLLM: (
        "--model",
        "--revision",
        "--served-model-name",
        "--host",
        "--port",
        "--max-num-batched-tokens",
        "--max-num-seqs",
        "--tensor-parallel-size",
        "-tp",
    ),
    # Of `sglang.launch_server` 0.5.
    RuntimeKind.SGLANG: (
        "--model",
        "--model-path",
        "--revision",
        "--served-model-name",
        "--host",
        "--port",
        "--chunked-prefill-size",
        "--max-running-requests",
        "--tensor-parallel-size",
        "--tp-size",
        "--tp",
        "--enable-metrics",
    ),
}
"""Options that a preset sets; `args` must not contain them."""

_NO_HTTP: Final = "starts a server that neither probes nor routers reach"
_HTTPS: Final = "makes the server expect HTTPS, but probes and routers send HTTP"
REFUSED_OPTIONS: Final[Mapping[str, str]] = {
    "--uds": _NO_HTTP,
    "--headless": _NO_HTTP,
    "--grpc": _NO_HTTP,
    "--grpc-mode": _NO_HTTP,
    "--api-key": "makes the server reject requests without the key; use spec.router.tenantsSecret",
    "--config": "reads options from a file that the operator does not see; write them in args",
    "--ssl-certfile": _HTTPS,
    "--ssl-keyfile": _HTTPS,
    "--disable-log-stats": "leaves the metrics page without values",
    "--": "ends the options, so those of the preset have no effect",
}
"""Options with which a server of a preset is of no use, and why; `args` must not contain them."""


_MAX_PATTERN: Final = 250
"""Longest pattern of a rule; the API server limits the cost of each rule."""


def _option_pattern(option: str) -> str:
    """Return the pattern of an option and its abbreviations.

    Both servers parse their options with argparse, which accepts `--hos` for `--host` and `-t` for
    `-tp`. vLLM also accepts '_' in place of '-', and a part of a JSON value, as in `--option.key`,
    which it moves behind all other options.
    """
    name = option.lstrip("-")
    if not name:
        return option
    pattern = ""
    for character in reversed(name[1:]):
        pattern = f"({'[-_]' if character == '-' else character}{pattern})?"
    return f"{option.removesuffix(name)}{name[0]}{pattern}"


def _patterns(options: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield patterns of arguments that begin with one of these options, none too long.

    Each follows a list of its options for users.
    """
    groups: list[list[str]] = [[]]
    for option in options:
        if len("|".join(map(_option_pattern, (*groups[-1], option)))) > _MAX_PATTERN:
            groups.append([])
        groups[-1].append(option)
    for group in groups:
        yield ", ".join(group), f"^({'|'.join(map(_option_pattern, group))})([=.]|$)"


def _args_rules(
    options: Iterable[str],
    kinds: Container[RuntimeKind],
    *,
    other_kinds: str,
    reason: Callable[[str], str],
    message: str,
) -> Iterator[CrossFieldRule]:
    """Yield rules by which the arguments of a server contain none of these options.

    Args:
        options: the options.
        kinds: kinds of servers to which the rules apply.
        other_kinds: CEL expression that is true for all other kinds.
        reason: returns the end of an error message, by the name of an option as it was written.
        message: message of the API server, before a list of the options.
    """
    for names, pattern in _patterns(options):

        def problem(runtime: RuntimeSpec, pattern: str = pattern) -> str | None:
            if runtime.kind not in kinds:
                return None
            found = next((arg for arg in runtime.args if re.search(pattern, arg)), None)
            if found is None:
                return None
            name = re.split("[=.]", found, maxsplit=1)[0].strip()
            return f"{name!r} {reason(name)}; see docs/runtimes.md"

        cel = Cel(
            rule=f"{other_kinds} || !has(self.args) || "
            f"!self.args.exists(a, a.matches('{pattern}'))",
            message=f"must not contain options {message}, abbreviated or not: {names}",
        )
        yield CrossFieldRule(field="args", cel=cel, problem=problem)


def _preset_rules(kind: RuntimeKind) -> Iterator[CrossFieldRule]:
    return _args_rules(
        PRESET_OPTIONS[kind],
        (kind,),
        other_kinds=f"self.kind != '{kind.value}'",
        reason=lambda _: f"is set by the preset of kind {kind.value}",
        message=f"that the preset of kind {kind.value} sets",
    )


def _refused_rules() -> Iterator[CrossFieldRule]:
    return _args_rules(
        REFUSED_OPTIONS,
        _PRESETS,
        other_kinds="!(self.kind in ['vLLM', 'SGLang'])",
        reason=_why_refused,
        message="with which probes, routers or the operator cannot use the server",
    )


def _why_refused(name: str) -> str:
    """Return why an option, or the first one with this abbreviation, is refused."""
    name = name.replace("_", "-")
    if name not in REFUSED_OPTIONS:
        name = next(option for option in REFUSED_OPTIONS if option.startswith(name))
    return REFUSED_OPTIONS[name]


def _check_first(runtime: RuntimeSpec) -> str | None:
    if runtime.kind not in _PRESETS or not runtime.args or runtime.args[0].startswith("-"):
        return None
    return f"must begin with an option, not {runtime.args[0][:60]!r}: the preset names the model"


def _check_image(runtime: RuntimeSpec) -> str | None:
    if runtime.foreign and runtime.image is None:
        return f"is required with kind {runtime.kind.value}"
    return None


def _check_goodput(runtime: RuntimeSpec) -> str | None:
    if runtime.foreign or runtime == RuntimeSpec():
        return None
    return "kind Goodput has no other fields; use spec.engine.image"


_ARGS_FIRST: Final = Cel(
    rule="!(self.kind in ['vLLM', 'SGLang']) || !has(self.args) || self.args.size() == 0 || "
    "self.args[0].startsWith('-')",
    message="must begin with an option, because the preset names the model",
)
_IMAGE_REQUIRED: Final = Cel(
    rule="self.kind == 'Goodput' || has(self.image)",
    message="is required with a kind other than Goodput",
)
_NOTHING_ELSE: Final = Cel(
    rule="self.kind != 'Goodput' || !(has(self.image) || has(self.args) || has(self.port) || "
    "has(self.healthPath) || has(self.metricsPath) || has(self.runAsUser))",
    message="kind Goodput has no other fields; use spec.engine.image",
)
_PATH_PATTERN: Final = r"^/[^\x00-\x20\x7f?#]*$"
_PATH_HINT: Final = "be a path that begins with '/' and has neither spaces nor a query"


def _path(doc: str) -> Any:
    return spec_field(
        doc, default=None, max_length=256, pattern=_PATH_PATTERN, pattern_hint=_PATH_HINT
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSpec:
    """The server that the engines' pods run."""

    RULES: ClassVar[tuple[CrossFieldRule, ...]] = (
        CrossFieldRule(field="image", cel=_IMAGE_REQUIRED, problem=_check_image),
        CrossFieldRule(field="kind", cel=_NOTHING_ELSE, problem=_check_goodput),
        CrossFieldRule(field="args", cel=_ARGS_FIRST, problem=_check_first),
        *(rule for kind in _PRESETS for rule in _preset_rules(kind)),
        *_refused_rules(),
    )

    kind: RuntimeKind = spec_field(
        "Goodput is the engine of this release. vLLM and SGLang run that server with the arguments "
        "that follow from the manifest. OpenAI runs any server with OpenAI's completion endpoints, "
        "with the given arguments alone.",
        default=RuntimeKind.GOODPUT,
    )
    image: str | None = spec_field(
        "Container image of another server.", default=None, min_length=1, max_length=512
    )
    args: tuple[str, ...] = spec_field(
        "Further arguments of the server. As in a pod, $(NAME) is replaced by an environment "
        "variable, for example $(GOODPUT_MODEL).",
        default=(),
        max_items=_MAX_ARGS,
        max_length=_MAX_ARG,
    )
    port: int | None = spec_field(
        "The port on which the server listens; default 8000.",
        default=None,
        minimum=1,
        maximum=65_535,
    )
    health_path: str | None = _path(
        "The path that returns status 200 when the server can serve requests; default /health, "
        "with kind OpenAI /v1/models."
    )
    metrics_path: str | None = _path(
        "The path of the server's Prometheus metrics; default /metrics. With kind OpenAI, no "
        "metrics are read without it."
    )
    run_as_user: int | None = spec_field(
        "The numeric user of the container, in group 0. Default: the user of the image, which must "
        "not be root, or the platform's. The image vllm/vllm-openai is prepared for 2000.",
        default=None,
        minimum=1,
        maximum=2_147_483_647,
    )

    @property
    def foreign(self) -> bool:
        """True if the pods run another server than Goodput's engine."""
        return self.kind is not RuntimeKind.GOODPUT

    @property
    def has_preset(self) -> bool:
        """True if arguments of the server follow from the manifest."""
        return self.kind in _PRESETS

    @property
    def serving_port(self) -> int:
        """The port on which another server listens."""
        return 8000 if self.port is None else self.port

    @property
    def probed_path(self) -> str:
        """The path of the probes of another server."""
        default = "/v1/models" if self.kind is RuntimeKind.OPENAI else "/health"
        return self.health_path or default

    @property
    def scraped_path(self) -> str | None:
        """The path of the metrics of another server; None if it has none."""
        default = None if self.kind is RuntimeKind.OPENAI else "/metrics"
        return self.metrics_path or default
