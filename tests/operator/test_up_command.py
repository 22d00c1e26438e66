"""The command line of `goodput up`, and errors before it starts."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.contract import ENV_CONTROL_TOKEN, ENV_LLMSERVICE, ENV_REPLICA
from goodput_core.dispatch import run_command
from goodput_core.errors import SpecError, UsageError
from goodput_core.spec.workloads import EngineSpec, RealModelSpec
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_operator.local.cli import _desired, _params, require_free
from goodput_operator.local.commands import Commands, Workspace, open_workspace
from goodput_operator.local.decide import RoutedReplica
from goodput_operator.local.manifest import (
    computes_model,
    ignored_here,
    model_options,
    read_manifest,
    require_device,
    use_model_path,
)
from goodput_operator.local.options import MAX_REPLICAS, parse_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_core.spec.llmservice import LLMService

CHAT = Path(__file__).parents[2] / "examples" / "chat.yaml"


def test_options_have_the_documented_defaults() -> None:
    options = parse_options(["-f", "chat.yaml"])
    assert options.manifest == Path("chat.yaml")
    assert (options.port, options.admin_port, options.replicas) == (8000, 0, None)
    assert (options.ready_timeout_ns, options.grace_ns) == (None, 30 * NS_PER_S)
    assert not options.json
    assert not options.exit_with_parent


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "-f/--file"),
        (["--port", "65536"], "'65536' is not a port in 0 to 65535"),
        (["--port", "-1"], "--port"),
        (["--port", "http"], "'http' is not a port"),
        (["--port", "٣"], "is not a port"),
        (["--port", "9" * 5000], "is not a port"),
        (["--replicas", "0"], "'0' is not a number of replicas in 1 to 64"),
        (["--replicas", "1.5"], "is not a number of replicas"),
        (["--grace", "30"], "'30' is not a duration; write for example"),
        (["--ready-timeout", "0s"], "'0s' is zero"),
        (["--port", "9000", "--admin-port", "9000"], "are both 9000"),
        (["--repl", "2"], "--repl"),
        (["extra"], "extra"),
    ],
    ids=lambda v: " ".join(v)[:30] if isinstance(v, list) else None,
)
def test_an_invalid_argument_is_rejected_in_a_sentence(argv: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=r"^goodput up: ") as caught:
        parse_options(argv if not argv else ["-f", "chat.yaml", *argv])
    assert words in str(caught.value)


def manifest(tmp_path: Path, change: Callable[[str], str]) -> str:
    path = tmp_path / "chat.yaml"
    path.write_text(change(CHAT.read_text(encoding="utf-8")), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("policy: sarathi", "policy: fifo", "spec.engine.policy: must be one of request, static,"),
        ("mode: Manual", "mode: off", "spec.control.mode: must be one of Auto, Recommend, Manual"),
        ("replicas: 2", "replicas: 0", "spec.replicas: must be 1 to 64 on this machine, not 0"),
        ("replicas: 2", "minReplicas: 0", "spec.minReplicas: must be 1 to 64 on this machine"),
        ("replicas: 2", "replicas: 65", "not 65; change the field, or set --replicas N"),
        (
            "replicas: 2",
            "minReplicas: 70\n  maxReplicas: 80",
            "spec.minReplicas: must be 1 to 64 on this machine, not 70",
        ),
        ("kind: LLMService", "kind: Pod", "kind: must be LLMService, not 'Pod'"),
    ],
    ids=[
        "policy",
        "mode-off",
        "no-replicas",
        "no-min-replicas",
        "replicas",
        "min-replicas",
        "kind",
    ],
)
def test_a_manifest_that_cannot_run_is_rejected_with_file_and_field(
    old: str, new: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = manifest(tmp_path, lambda text: text.replace(old, new))
    assert run_command(["up", "-f", path, "--port", "0"]) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {path}: ")
    assert words in err
    assert err.count("\n") == 1


def test_replicas_on_the_command_line_override_min_replicas_above_the_maximum(
    tmp_path: Path,
) -> None:
    path = manifest(
        tmp_path, lambda text: text.replace("replicas: 2", "minReplicas: 70\n  maxReplicas: 80")
    )
    options = parse_options(["-f", path, "--replicas", "3"])
    service, _ = read_manifest(options.manifest)
    assert _desired(service, options).replicas == 3
    params = _params(service, options)
    assert (params.replicas, params.min_replicas, params.max_replicas) == (3, 64, 64)


def test_a_real_model_has_more_time_to_become_ready(tmp_path: Path) -> None:
    def limit_s(source: str, *words: str) -> float:
        path = manifest(tmp_path, lambda text: text.replace("emulated://llama-3-8b-h100", source))
        options = parse_options(["-f", path, *words])
        service, _ = read_manifest(options.manifest)
        return _desired(service, options).ready_timeout_ns / NS_PER_S

    assert limit_s("emulated://unit") == 60
    assert limit_s("file:///models/chat") == 600
    assert limit_s("file:///models/chat", "--device", "unit") == 60
    assert limit_s("file:///models/chat", "--ready-timeout", "5s") == 5


@pytest.mark.parametrize(
    ("change", "device", "error"),
    [
        (("", ""), "h200", "--device: no device profile is called 'h200'; use one of llama-3"),
        (("", ""), "./no.yaml", "--device: no.yaml: the device profile cannot be read: No such"),
        (("", ""), "./", "--device: .: is not a file; name the YAML file of a device profile"),
        (
            ("", ""),
            "published-70b-table",
            "{path}: spec.engine.tensorParallel: is 1, but the device profile published-70b-table ",
        ),
        (
            ("llama-3-8b-h100", "h200"),
            "",
            "{path}: spec.model.source: no device profile is called 'h200'; use one of llama-3",
        ),
        (
            ("llama-3-8b-h100", "./no.yaml"),
            "",
            "{path}: spec.model.source: no.yaml: the device profile cannot be read: No such",
        ),
        (
            ("emulated://llama-3-8b-h100", "pvc://weights/chat"),
            "",
            "{path}: spec.model.source: pvc://weights/chat is a volume of a cluster; give",
        ),
        (
            ("min: 256", "min: 8"),
            "",
            "{path}: spec.engine.tokenBudget.min: is 8, less than one KV block of the device pro",
        ),
        (
            ("min: 256", "min: 8"),
            "unit",
            "{path}: spec.engine.tokenBudget.min: is 8, less than one KV block of the device pro",
        ),
        (("min: 256", "min: 8"), "{file}", "{path}: spec.engine.tokenBudget.min: is 8, less than"),
        (
            ("", ""),
            "{file}",
            "{file}: 20 KV blocks of 16 tokens hold 320 tokens, too few for one request; the memor",
        ),
        (
            ("llama-3-8b-h100", "{file}"),
            "",
            "{file}: 20 KV blocks of 16 tokens hold 320 tokens, too few for one request; the memor",
        ),
    ],
    ids=[
        "an unknown device",
        "no file",
        "a folder",
        "another tensor parallelism",
        "an unknown source",
        "no file of the source",
        "a claim",
        "a budget below one block",
        "a budget below one block of the device",
        "a budget below one block of the file",
        "little memory of the device",
        "little memory of the source",
    ],
)
def test_a_profile_that_engines_cannot_load_is_rejected_before_processes_start(
    change: tuple[str, str],
    device: str,
    error: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "small.yaml"
    numbers = {"kv_blocks": 20, "block_size": 16, "max_model_tokens": 4096}
    values = "".join(
        f"  {name}: {{value: {value}, from: a test}}\n" for name, value in numbers.items()
    )
    file.write_text(f"numbers:\n{values}", encoding="utf-8")
    old, new = change
    path = manifest(tmp_path, lambda text: text.replace(old, new.format(file=file)))
    options = ["--device", device.format(file=file)] if device else []
    assert run_command(["up", "-f", path, "--port", "0", *options]) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {error.format(path=path, file=file)}")
    assert err.count("\n") == 1


def test_a_path_replaces_a_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = manifest(tmp_path, lambda text: text.replace("emulated://llama-3-8b-h100", "pvc://a/b"))
    service, _ = read_manifest(Path(path))
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    for folder in (str(tmp_path), f"~/{tmp_path.name}"):
        replaced = use_model_path(service, folder)
        assert replaced.spec.model.source == f"file://{tmp_path}"
        require_device(replaced, device=None)
        assert computes_model(replaced, device=None)
    start = ["up", "-f", path, "--port", "0", "--model-path"]
    for options, error in (
        ([f"{tmp_path}/no"], f"--model-path: {tmp_path}/no does not exist; name a folder"),
        ([str(tmp_path), "--device", "unit"], "--device and --model-path exclude each other"),
    ):
        assert run_command([*start, *options]) == 64
        assert error in capsys.readouterr().err


def test_a_readable_profile_of_the_user_is_accepted(tmp_path: Path) -> None:
    profile = tmp_path / "mine.yml"
    profile.write_text("form: unit", encoding="utf-8")
    service, _ = read_manifest(CHAT)
    require_device(service, device=str(profile))
    require_device(service, device="llama-3-8b-h200")
    weights, _ = read_manifest(
        Path(manifest(tmp_path, lambda t: t.replace("emulated://llama-3-8b-h100", "hf://a/b")))
    )
    require_device(weights, device=str(profile))
    require_device(weights, device=None)


def test_a_damaged_gguf_file_is_reported_before_a_replica_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chat.GGUF"
    file.write_bytes(b"<html>not found</html>")
    path = manifest(tmp_path, lambda t: t.replace("emulated://llama-3-8b-h100", f"file://{file}"))
    assert run_command(["up", "-f", path, "--port", "0"]) == 64
    assert capfd.readouterr().err.splitlines()[-1] == (
        f"error: {file}: is not a GGUF file; download it again"
    )


def test_a_folder_of_a_real_model_must_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights(folder: str | Path) -> LLMService:
        path = manifest(
            tmp_path, lambda t: t.replace("emulated://llama-3-8b-h100", f"file://{folder}")
        )
        return read_manifest(Path(path))[0]

    require_device(weights(tmp_path), device=None)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    require_device(weights(f"~/{tmp_path.name}"), device=None)
    require_device(weights(tmp_path / "none"), device="unit")
    with pytest.raises(
        SpecError, match=r"spec\.model\.source: /.*/none is neither a folder nor a GGUF"
    ):
        require_device(weights(tmp_path / "none"), device=None)
    assert ignored_here(weights(tmp_path), device=None) == []


@given(replicas=st.integers(1, MAX_REPLICAS), percent_of_all=st.none() | st.integers(1, 95))
def test_replicas_of_a_real_model_share_memory_and_cores(
    replicas: int, percent_of_all: int | None
) -> None:
    real_model = RealModelSpec(
        memory_utilization=None if percent_of_all is None else f"{percent_of_all}%"
    )
    utilization, percent, threads, count = model_options(
        EngineSpec(real_model=real_model), replicas
    )
    assert (utilization, threads) == ("--memory-utilization", "--threads")
    assert percent == f"{max(1, (percent_of_all or 50) // replicas)}%"
    assert 1 <= int(count) <= max(1, len(os.sched_getaffinity(0)) - 1)


def test_replicas_get_the_threads_of_the_manifest() -> None:
    engine = EngineSpec(real_model=RealModelSpec(threads=7), http_processes=9)
    assert model_options(engine, 2)[2:] == ("--threads", "7")


def test_each_further_http_process_of_a_replica_leaves_a_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    assert model_options(EngineSpec(), 2)[3] == "7"
    assert model_options(EngineSpec(http_processes=3), 2)[3] == "5"
    assert model_options(EngineSpec(http_processes=64), 2)[3] == "1"


def test_replicas_share_the_processors_of_the_control_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    monkeypatch.setattr("goodput_core.process._cpu_quotas", lambda _: [9])
    assert model_options(EngineSpec(), 2)[3] == "4"


@pytest.mark.parametrize("option", ["--port", "--admin-port"])
def test_a_port_in_use_is_rejected_with_its_option(option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UsageError, match=rf"^port {port} on 127\.0\.0\.1 is in use.*{option} 0"
        ):
            require_free(port, option)
    require_free(port, option)
    require_free(0, option)


def test_the_file_of_upstreams_is_replaced_atomically() -> None:
    with open_workspace("chat", "my.yaml", "kind: LLMService") as workspace:
        assert workspace.manifest.name == "my.yaml"
        assert workspace.manifest.read_text() == "kind: LLMService"
        assert json.loads(workspace.upstreams.read_text()) == []
        before = workspace.upstreams.stat().st_ino
        workspace.publish((RoutedReplica(name="chat-0", url="http://a:1", admin_url="http://a:2"),))
        assert json.loads(workspace.upstreams.read_text()) == [
            {"name": "chat-0", "url": "http://a:1", "admin_url": "http://a:2"}
        ]
        assert workspace.upstreams.stat().st_ino != before
        folder = workspace.manifest.parent
        assert len(list(folder.iterdir())) == 2
    assert not folder.exists()


def test_commands_have_the_documented_options_and_environment() -> None:
    commands = Commands(
        service="chat",
        workspace=Workspace(manifest=Path("/w/chat.yaml"), upstreams=Path("/w/upstreams.json")),
        token="secret",
        device="h100",
        grace_ns=1500 * NS_PER_MS,
        environment={"PATH": "/bin", ENV_REPLICA: "from outside"},
    )
    engine = commands.replica("chat-0")
    assert " ".join(engine.argv[1:]) == (
        "-m goodput_core engine -f /w/chat.yaml --port 0 --admin-port 0 --device h100 "
        "--host 127.0.0.1 --grace 1500ms --json --exit-with-parent"
    )
    assert engine.env == {
        "PATH": "/bin",
        ENV_LLMSERVICE: "chat",
        ENV_REPLICA: "chat-0",
        ENV_CONTROL_TOKEN: "secret",
    }
    router = commands.router("chat-router", port=8000, admin_port=0)
    assert " ".join(router.argv[1:]) == (
        "-m goodput_core router -f /w/chat.yaml --upstreams /w/upstreams.json --port 8000 "
        "--admin-port 0 --host 127.0.0.1 --grace 1500ms --json --exit-with-parent"
    )
    assert "secret" not in repr(commands)
    protected = replace(commands, api_key_file=Path("/keys"))
    for command in (protected.replica("chat-0"), protected.router("r", port=0, admin_port=0)):
        assert "--api-key-file /keys" in " ".join(command.argv)


def test_ignored_fields_are_reported(tmp_path: Path) -> None:
    path = manifest(
        tmp_path,
        lambda text: (
            text.replace("replicas: 1", "replicas: 3\n    image: r\n    drainSeconds: 1")
            .replace(
                "mode: Manual",
                'mode: Manual\n    prometheus: {url: "http://p"}\n'
                "  rollout: {progressDeadlineSeconds: 60, gate: {trace: sample}}",
            )
            .replace(
                "llama-3-8b-h100",
                "llama-3-8b-h100\n    revision: abc\n    offline: true\n"
                "    cache: {claimName: c}\n    tokenSecret: {name: t}\n  suspend: true",
            )
            .replace(
                "policy: sarathi",
                "image: i\n    resources: {limits: {cpu: 1}}\n    startupDeadlineSeconds: 9\n"
                "    pod: {nodeSelector: {a: b}}\n    realModel: {kvBlocks: 7}\n"
                "    policy: sarathi",
            )
        ),
    )
    notes = ignored_here(read_manifest(Path(path))[0], device=None)
    fields = [
        "spec.model.revision",
        "spec.model.cache",
        "spec.model.tokenSecret",
        "spec.model.offline",
        "spec.engine.realModel",
        "spec.engine.startupDeadlineSeconds",
        "spec.engine.image",
        "spec.engine.resources",
        "spec.engine.pod",
        "spec.router.image",
        "spec.router.drainSeconds",
        "spec.suspend",
        "spec.control.prometheus",
        "spec.rollout.progressDeadlineSeconds",
        "spec.rollout.gate",
        "spec.router.replicas",
    ]
    assert [note.split(" ")[0] for note in notes] == fields
    assert ignored_here(read_manifest(CHAT)[0], device=None) == []
