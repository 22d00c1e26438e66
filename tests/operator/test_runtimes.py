"""Pods of other servers: presets, revisions, probes and drains."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from tests.builders.manifests import llmservice as service

from goodput_core.spec.choices import RuntimeKind
from goodput_core.spec.runtime import PRESET_OPTIONS
from goodput_core.spec.workloads import EngineSpec
from goodput_operator.render.metadata import Owner
from goodput_operator.render.pods import Installation
from goodput_operator.render.revisions import engine_revision
from goodput_operator.render.runtimes import server_command
from goodput_operator.render.secrets import secret_of

OWNER = Owner(name="chat", namespace="models", uid="5a0c")
INSTALLATION = Installation(engine_image="e:1", router_image="r:1")
HUB = {"source": "hf://Qwen/Qwen3-8B", "revision": "abc"}


def runtime(kind: str = "vLLM", **more: Any) -> dict[str, Any]:
    return {"kind": kind, "image": "server:1", **more}


def command_of(model: dict[str, Any] = HUB, **engine: Any) -> list[str]:
    spec = service(model=model, engine=engine).spec
    process = server_command("chat", spec)
    return [*process.get("command", []), *process.get("args", [])]


def container_of(model: dict[str, Any] = HUB, **engine: Any) -> dict[str, Any]:
    spec = service(model=model, engine=engine).spec
    revision = engine_revision(OWNER, spec, INSTALLATION, number=1)
    container: dict[str, Any] = revision.template["spec"]["containers"][0]
    return container


@pytest.mark.parametrize("kind", ["vLLM", "SGLang"])
def test_a_user_argument_precedes_those_of_the_preset(kind: str) -> None:
    # The last occurrence of an option applies.
    command = command_of(runtime=runtime(kind, args=["--user-option"]))
    assert command.index("--user-option") < min(
        index for index, arg in enumerate(command) if arg in PRESET_OPTIONS[RuntimeKind(kind)]
    )


@pytest.mark.parametrize("kind", [RuntimeKind.VLLM, RuntimeKind.SGLANG])
def test_each_option_after_the_users_is_reserved(kind: RuntimeKind) -> None:
    command = command_of(runtime=runtime(kind.value, args=["--user-option"]), tensorParallel=2)
    after = command[command.index("--user-option") + 1 :]
    assert {arg for arg in after if arg.startswith("-")} <= set(PRESET_OPTIONS[kind])


def test_a_claim_is_served_from_its_mount_without_a_revision() -> None:
    for kind in ("vLLM", "SGLang"):
        command = command_of({"source": "pvc://weights/a$(B)"}, runtime=runtime(kind))
        assert "/var/lib/goodput/claims/weights/a$$(B)" in command
        assert "--revision" not in command


def test_any_server_gets_its_arguments_alone_and_the_models_place_by_variable() -> None:
    container = container_of(runtime=runtime("OpenAI", args=["serve", "$(GOODPUT_MODEL)"]))
    assert "command" not in container, "the image's entry point runs"
    assert container["args"] == ["serve", "$(GOODPUT_MODEL)"]
    assert {"name": "GOODPUT_MODEL", "value": "Qwen/Qwen3-8B"} in container["env"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/v1/models"


def test_another_server_has_no_token_no_manifest_and_no_admin_port() -> None:
    spec = service(model=HUB, engine={"runtime": runtime(port=8100, healthPath="/live")}).spec
    template = engine_revision(OWNER, spec, INSTALLATION, number=1).template
    assert secret_of(template) is None
    container = template["spec"]["containers"][0]
    assert [port["containerPort"] for port in container["ports"]] == [8100]
    assert {m["mountPath"] for m in container["volumeMounts"]} == {
        "/tmp",
        "/dev/shm",
        "/var/cache/goodput",
    }
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/live", "port": "http"}
    assert template["metadata"]["annotations"] == {
        "goodput.dev/llmservice-uid": OWNER.uid,
        "goodput.dev/runtime": "vLLM",
        "goodput.dev/metrics": ":8100/metrics",
    }


@pytest.mark.parametrize("path", ["/tmp", "/dev/shm", "/dev/shm/", "//tmp"])
def test_a_volume_of_the_spec_can_take_the_place_of_a_rendered_one(path: str) -> None:
    volumes = [{"name": "mine", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}]
    pod = {"volumes": volumes, "volumeMounts": [{"name": "mine", "mountPath": path}]}
    spec = service(model=HUB, engine={"runtime": runtime(), "pod": pod}).spec
    template = engine_revision(OWNER, spec, INSTALLATION, number=1).template["spec"]
    mounts = {m["mountPath"]: m["name"] for m in template["containers"][0]["volumeMounts"]}
    assert mounts.pop(path) == "mine"
    other = "/dev/shm" if "tmp" in path else "/tmp"
    assert set(mounts) == {other, "/var/cache/goodput"}
    assert {volume["name"] for volume in template["volumes"]} == {"mine", *mounts.values()}


def test_a_server_without_a_metrics_path_is_not_scraped() -> None:
    spec = service(model=HUB, engine={"runtime": runtime("OpenAI")}).spec
    template = engine_revision(OWNER, spec, INSTALLATION, number=1).template
    assert template["metadata"]["annotations"] == {
        "goodput.dev/llmservice-uid": OWNER.uid,
        "goodput.dev/runtime": "OpenAI",
    }


def test_responses_have_their_time_before_another_server_gets_sigterm() -> None:
    spec = service(model=HUB, engine={"runtime": runtime(), "drainSeconds": 45}).spec
    pod = engine_revision(OWNER, spec, INSTALLATION, number=1).template["spec"]
    wait_s = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert wait_s > 45
    assert pod["terminationGracePeriodSeconds"] > wait_s


def test_a_set_user_is_in_group_0_and_is_never_root() -> None:
    spec = service(model=HUB, engine={"runtime": runtime(runAsUser=2000)}).spec
    security = engine_revision(OWNER, spec, INSTALLATION, number=1).template["spec"][
        "securityContext"
    ]
    assert security["runAsNonRoot"] is True
    assert (security["runAsUser"], security["runAsGroup"]) == (2000, 0)


@pytest.mark.parametrize(
    ("engine", "new"),
    [
        ({"tokenBudget": {"initial": 4096}}, True),
        ({"tokenBudget": {"max": 16384}}, False),
        ({"maxNumSeqs": 64}, True),
        ({"runtime": runtime(args=["--seed", "1"])}, True),
        ({"runtime": runtime(image="server:2")}, True),
        ({"runtime": runtime(port=None)}, False),
    ],
    ids=["batched tokens", "bound of the budget", "width", "arguments", "image", "absent port"],
)
def test_what_changes_the_servers_process_is_a_new_revision(
    engine: dict[str, Any], new: bool
) -> None:
    def name(**more: Any) -> str:
        spec = service(model=HUB, engine={"runtime": runtime(), **more}).spec
        return engine_revision(OWNER, spec, INSTALLATION, number=1).name

    assert (name(**engine) != name()) is new


def test_each_field_of_the_engine_is_used_or_rejected_with_another_server() -> None:
    used = {
        "runtime",
        "resources",
        "drain_seconds",
        "startup_deadline_seconds",
        "pod",
        "token_budget",
    }
    spelt = {rule.field for rule in EngineSpec.RULES}
    defaults = EngineSpec()
    for field in fields(EngineSpec):
        head, *rest = field.name.split("_")
        name = head + "".join(part.capitalize() for part in rest)
        if field.name in used:
            continue
        assert name in spelt, f"{name}: a rule must reject it with another server"
        (cel,) = [rule.cel.rule for rule in EngineSpec.RULES if rule.field == name]
        default = getattr(defaults, field.name)
        if default is not None and not is_dataclass(default):
            shown = f"'{default}'" if isinstance(default, str) else str(default)
            assert f"self.{name} == {shown}" in cel, "the API server knows another default"
