"""Manifests that the engines could not serve are rejected by name."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tests.builders.manifests import llmservice

from goodput_core.control import ServiceParams
from goodput_core.errors import ExitCode, SpecError, UnsupportedError
from goodput_core.spec.profiles import SHIPPED_BLOCK_SIZE, SHIPPED_PROFILES, memory_problem
from goodput_core.spec.support import (
    require_mounted_profile,
    require_servable,
)
from goodput_engine.device.load import list_profiles, load_profile

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import LLMService

service = partial(llmservice, "engine")


@pytest.mark.parametrize(
    ("source", "folders", "problem"),
    [
        ("file:///b", True, None),
        ("pvc://claim/b", False, None),
        ("file:///b", False, "is a folder of one machine, which pods cannot read"),
        ("pvc://claim/b", True, "with --model-path, or emulate a device profile with --device"),
        ("hf://a/b", False, "is required for hf://a/b in a cluster"),
        ("hf://a/b", True, None),
    ],
    ids=["folder here", "claim in pods", "folder in pods", "claim here", "hub in pods", "hub here"],
)
def test_real_weights_are_served_where_the_engines_can_get_them(
    source: str, folders: bool, problem: str | None
) -> None:
    weights = service(model__source=source)
    if problem is None:
        require_servable(weights, folders=folders)
        return
    with pytest.raises(SpecError, match=re.escape(problem)) as caught:
        require_servable(weights, folders=folders)
    field = "revision" if source.startswith("hf:") else "source"
    assert caught.value.path == f"spec.model.{field}"
    assert source in str(caught.value)


def test_a_capacity_is_expected_of_other_servers_only() -> None:
    expected = {"model__source": "pvc://claim/b", "control__replicaRequestsPer1000Seconds": 1500}
    found = llmservice("least", engine={"runtime": {"kind": "vLLM", "image": "v:1"}}, **expected)
    require_servable(found)
    assert ServiceParams.of(found.spec).expected_per_s == 1.5
    with pytest.raises(SpecError, match="reports its step times; remove it") as caught:
        require_servable(llmservice("least", **expected))
    assert caught.value.path == "spec.control.replicaRequestsPer1000Seconds"


def test_pods_serve_a_commit_of_the_hub() -> None:
    require_servable(service(model__source="hf://a/b", model__revision="c0ffee" * 6 + "beef"))


@pytest.mark.parametrize("revision", ["main", "v1.0", "c0ffee", "C0FFEE" * 6 + "BEEF"])
def test_a_revision_that_can_move_is_rejected_in_pods_only(revision: str) -> None:
    moving = service(model__source="hf://a/b", model__revision=revision)
    require_servable(moving, folders=True)
    with pytest.raises(SpecError, match=f"{revision!r} is a tag, a branch or a part") as caught:
        require_servable(moving)
    assert caught.value.path == "spec.model.revision"


def test_a_folder_in_the_home_directory_can_be_served() -> None:
    require_servable(service(model__source="file://~/models/chat"), folders=True)


@pytest.mark.parametrize("path", ["models/chat", "~", "~other/chat"])
def test_a_relative_folder_is_rejected(path: str) -> None:
    with pytest.raises(SpecError, match=f"'{path}' is not an absolute path"):
        require_servable(service(model__source=f"file://{path}"), folders=True)


@pytest.mark.parametrize("name", ["Qwen3-8B", "a/b/c", "../b", "a/b?c"])
def test_a_model_of_the_hub_has_an_organization_and_a_name(name: str) -> None:
    with pytest.raises(SpecError, match="is not ORG/NAME of a model on the Hub"):
        require_servable(service(model__source=f"hf://{name}"), folders=True)


@pytest.mark.parametrize("source", ["file:///models/chat", "pvc://models/chat"])
def test_several_devices_are_rejected(source: str) -> None:
    wide = service(model__source=source, engine__tensorParallel=2)
    with pytest.raises(UnsupportedError, match="is 2, but real models are computed on one device"):
        require_servable(wide, folders=source.startswith("file:"))


@pytest.mark.parametrize(
    ("engine", "needed"),
    [
        ({"httpProcesses": 4, "resources": {"limits": {"cpu": 4}, "requests": {"cpu": 8}}}, 5),
        ({"httpProcesses": 2, "resources": {"requests": {"cpu": "2999m"}}}, 3),
        (
            {
                "httpProcesses": 2,
                "realModel": {"threads": 7},
                "resources": {"limits": {"cpu": "8"}},
            },
            9,
        ),
    ],
    ids=["no CPU for the core", "the requested CPUs", "threads"],
)
def test_http_processes_need_cpus_of_the_pod(engine: dict[str, Any], needed: int) -> None:
    def require(engine: dict[str, Any], *, folders: bool) -> None:
        fields = {f"engine__{name}": value for name, value in engine.items()}
        require_servable(service(**fields), folders=folders)

    with pytest.raises(SpecError, match=f"need {needed} CPUs, but") as caught:
        require(engine, folders=False)
    assert caught.value.path == "spec.engine.httpProcesses"
    require(engine, folders=True)  # resources are ignored on this machine
    require({**engine, "httpProcesses": 1}, folders=False)
    require({**engine, "resources": {}}, folders=False)
    require({**engine, "resources": {"limits": {"cpu": needed}}}, folders=False)


@pytest.mark.parametrize(
    "gate",
    [
        {"trace": "file:///srv/prod.parquet"},
        {"trace": "sample", "history": "file:///srv/history"},
        {"trace": "sample", "tokenizer": "file:///srv/tokenizer.json"},
    ],
    ids=["trace", "history", "tokenizer"],
)
def test_pods_cannot_read_the_files_of_one_machine(gate: dict[str, str]) -> None:
    gated = service(rollout__gate=gate)
    require_servable(gated, folders=True)
    with pytest.raises(SpecError, match="is on one machine, and pods cannot read it"):
        require_servable(gated)
    in_claims = {field: place.replace("file:///", "pvc://") for field, place in gate.items()}
    require_servable(service(rollout__gate=in_claims))


def test_an_error_keeps_its_type_when_it_names_the_file() -> None:
    wide = service(model__source="pvc://models/chat", engine__tensorParallel=2)
    with pytest.raises(UnsupportedError) as caught:
        require_servable(wide)
    assert caught.value.exit_code is ExitCode.USAGE
    named = caught.value.at("chat.yaml")
    assert isinstance(named, UnsupportedError)
    assert str(named).startswith("chat.yaml: spec.engine.tensorParallel: is 2, but")


def test_the_table_has_the_profiles_of_the_engine() -> None:
    shipped = {name: load_profile(name).tensor_parallel for name in list_profiles()}
    assert dict(SHIPPED_PROFILES) == shipped
    assert {load_profile(name).block_size for name in shipped} == {SHIPPED_BLOCK_SIZE}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"model__source": "emulated://unit", "engine__tokenBudget": {"min": 8}},
            "is 8, less than one KV block of the device profile unit; set at least 16",
        ),
        (
            {"model__source": "file:///chat", "engine__tokenBudget": {"min": 15}},
            r"is 15, less than one KV block of the model \(spec.engine.realModel.blockSize\); set ",
        ),
        (
            {
                "model__source": "file:///chat",
                "engine__tokenBudget": {"min": 64},
                "engine__realModel": {"blockSize": 128},
            },
            "is 64, less than one KV block of the model .*; set at least 128",
        ),
    ],
    ids=["a profile", "a model", "large blocks"],
)
def test_a_token_budget_below_one_block_is_rejected(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem) as caught:
        require_servable(service(**fields), folders=True)
    assert caught.value.path == "spec.engine.tokenBudget.min"
    fields["engine__tokenBudget"] = {"min": 128}
    require_servable(service(**fields), folders=True)


@pytest.mark.parametrize(
    ("blocks", "context", "budget", "fits"),
    [
        (1, 10**6, 64, False),
        (31, 10**6, 64, False),
        (32, 10**6, 64, True),
        (32, 10**6, 1024, False),
        (64, 10**6, 1024, True),
        (4, 65, 64, True),
        (4, 66, 64, False),
        (4, 66, 1024, False),
    ],
)
def test_kv_memory_holds_a_small_request_a_smallest_step_or_the_context(
    blocks: int, context: int, budget: int, fits: bool
) -> None:
    problem = memory_problem(
        kv_blocks=blocks, block_size=16, context_tokens=context, min_budget=budget
    )
    assert (problem is None) == fits


def test_an_unknown_profile_is_rejected_with_the_list_of_profiles() -> None:
    unknown = service(model__source="emulated://a100")
    with pytest.raises(
        SpecError, match=r"no device profile is called 'a100'; use one of .*unit"
    ) as caught:
        require_servable(unknown)
    assert caught.value.path == "spec.model.source"


@pytest.mark.parametrize(
    ("profile", "wanted"), [("unit", 2), ("llama-3-70b-4xh100", 1), ("llama-3-70b-4xh100-pp2", 4)]
)
def test_a_wrong_tensor_parallelism_is_rejected_with_the_right_one(
    profile: str, wanted: int
) -> None:
    wrong = service(model__source=f"emulated://{profile}", engine__tensorParallel=wanted)
    expected = SHIPPED_PROFILES[profile]
    with pytest.raises(SpecError, match=f"is {wanted}, .*; set it to {expected}") as caught:
        require_servable(wrong)
    assert caught.value.path == "spec.engine.tensorParallel"


def test_a_profile_given_as_a_path_is_not_checked() -> None:
    require_servable(service(model__source="emulated://profiles/mine.yaml"))


def mounting(source: str, *folders: str) -> LLMService:
    pod = {
        "volumes": [{"name": "profiles", "configMap": {"name": "profiles"}}],
        "volumeMounts": [{"name": "profiles", "mountPath": folder} for folder in folders],
    }
    return service(model__source=f"emulated://{source}", engine__pod=pod)


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("/profiles/mine.yaml", "/profiles"),
        ("/profiles/mine.yaml", "/profiles/"),
        ("/profiles/mine.yaml", "/profiles/mine.yaml"),
        ("/data/../profiles/a/mine.yaml", "/profiles"),
        ("/mine.yaml", "/"),
        ("unit", "/profiles"),
    ],
    ids=["in the folder", "trailing slash", "the file", "normalised", "the root", "shipped"],
)
def test_a_profile_in_a_mounted_volume_is_accepted(path: str, folder: str) -> None:
    require_mounted_profile(mounting(path, "/data", folder))


@pytest.mark.parametrize(
    "path",
    ["typo.yaml", "profiles/mine.yaml", "/profiles2/mine.yaml", "/profiles/../mine.yaml"],
    ids=["a name", "relative", "another folder", "outside after normalisation"],
)
def test_a_profile_outside_of_the_mounts_is_rejected_with_the_remedy(path: str) -> None:
    with pytest.raises(SpecError, match=r"mount a volume that has the file") as caught:
        require_mounted_profile(mounting(path, "/profiles"))
    assert caught.value.path == "spec.model.source"
    assert repr(path) in str(caught.value)


@pytest.mark.parametrize(
    ("source", "folders", "field"),
    [
        ("emulated://unit", False, "spec.model.source"),
        ("file:///weights", False, "spec.model.source"),
        ("hf://a/b", False, "spec.model.revision"),
        ("hf://a/b", True, "spec.engine.runtime.kind"),
        ("pvc://c/d", True, "spec.engine.runtime.kind"),
        ("pvc://c/d", False, None),
    ],
)
def test_another_server_needs_weights_and_a_cluster(
    source: str, folders: bool, field: str | None
) -> None:
    vllm = {"kind": "vLLM", "image": "v"}
    served = llmservice(model__source=source, engine__runtime=vllm, engine__tensorParallel=2)
    if field is None:
        require_servable(served, folders=folders)
        return
    with pytest.raises((SpecError, UnsupportedError)) as caught:
        require_servable(served, folders=folders)
    assert caught.value.path == field
