"""`kubectl goodput` shows recorded objects, which a program in kubectl's place prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from goodput_operator.plugin.views import decision_views, input_lines, load_view

PLUGIN = Path(sys.executable).parent / "kubectl-goodput"
ESC = "\x1b"
DECISION = {
    "at": "2026-11-27T02:40:10Z",
    "knob": "Replicas",
    "reason": "Demand",
    "message": "replicas 2 → 3: 4.7 requests/s arrive; 3 replicas keep the targets at up to 5.1",
    "applied": True,
}
INPUTS = {
    "interval_seconds": 10,
    "signal": "fresh",
    "arrivals": 47,
    "in_flight": 9,
    "classes": [
        {
            "name": "interactive",
            "ttft": {"judged": 40, "missed": 3, "close": 5},
            "tpot": {"judged": 40, "missed": 0, "close": 0},
        }
    ],
    "replicas": {"ready": 2},
    "running": 8,
    "waiting": 4,
    "kv_used_blocks": 30,
    "kv_total_blocks": 100,
    "preemptions": 0,
    "min_replicas": 1,
    "max_replicas": 8,
    "replica_law": {"arrivals_per_s": 4.7, "sustained_per_s": 5.1, "peak_per_s": None},
}
SERVICE: dict[str, Any] = {
    "metadata": {"name": "chat", "namespace": "team", "generation": 3},
    "spec": {
        "minReplicas": 1,
        "maxReplicas": 8,
        "slo": {
            "classes": [
                {"name": "interactive", "ttftMs": 500, "tpotMs": 50, "objective": "99%"},
                {"name": "batch", "ttftMs": 30000, "tpotMs": 200},
            ]
        },
    },
    "status": {
        "summary": {"phase": "Serving", "replicas": "2/3", "attainment": "99.10% ≥ 99%"},
        "goodput": "4.61",
        "tokenBudget": 1536,
        "classes": [
            {
                "name": "interactive",
                "good": 991,
                "total": 1000,
                "attainment": "99.10%",
                "lower": "98.30%",
                "upper": "99.60%",
                "objective": "99%",
            }
        ],
        "conditions": [
            {"type": "Ready", "status": "True", "reason": "Serving", "message": f"{ESC}[31mred"}
        ],
        "decisions": [DECISION, {**DECISION, "at": "2026-11-27T02:30:00Z", "applied": False}],
        "gate": {
            "revision": "chat-2",
            "baseline": "chat-1",
            "phase": "Failed",
            "verdict": "FAIL",
            "reason": "BelowObjective",
            "message": "interactive: 812 of 1000 requests met their targets",
            "interval": "78.9% to 83.2%",
            "report": "pvc://runs/chat-2/report.html",
        },
    },
}
LOG = [
    {"event": "decision", "namespace": "team", "llmservice": "chat",
     "detail": DECISION["message"], "inputs": INPUTS},
    {"event": "decision", "namespace": "other", "llmservice": "chat",
     "detail": DECISION["message"], "inputs": {"arrivals": 1}},
]  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A folder with a program named kubectl that prints the files beside it."""
    program = tmp_path / "kubectl"
    program.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {tmp_path}/calls\n'
        'case "$*" in\n'
        f'*logs*) cat "{tmp_path}/log" ;;\n'
        f'*proxy*) cat "{tmp_path}/${{*##*/}}" ;;\n'
        f'*pods*) cat "{tmp_path}/pods" ;;\n'
        f'*deployments*) cat "{tmp_path}/deployments" ;;\n'
        f'*llmservices.goodput.dev/*) cat "{tmp_path}/service" ;;\n'
        f'*llmservices.goodput.dev*) cat "{tmp_path}/services" ;;\n'
        "esac\n"
    )
    program.chmod(0o755)
    found = [{"metadata": {"namespace": "goodput-system"}}]
    write(tmp_path, service=SERVICE, services={"items": [SERVICE]}, deployments={"items": found})
    log = "\n".join(["not JSON", *(json.dumps(one) for one in LOG)])
    (tmp_path / "log").write_text(log, encoding="utf-8")
    return tmp_path


def write(folder: Path, **objects: Any) -> None:
    for name, value in objects.items():
        (folder / name).write_text(json.dumps(value), encoding="utf-8")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{folder}:/usr/bin:/bin", "FORCE_COLOR": ""}
    return subprocess.run(
        [PLUGIN, *arguments], capture_output=True, text=True, env=environment, check=False
    )


def test_status_shows_classes_conditions_and_no_control_characters(cluster: Path) -> None:
    done = run(cluster, "status", "chat", "-n", "team", "--context", "prod")
    assert done.returncode == 0, done.stderr
    assert ESC not in done.stdout, "neither colours in a pipe nor those of a message"
    assert "\\x1b[31mred" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["interactive", "500", "ms", "50", "ms", "99%", "991/1000", "99.10%", "98.30%", "to",
            "99.60%"] in rows  # fmt: skip
    assert ["batch", "30000", "ms", "200", "ms", "–", "–", "–", "–"] in rows
    (call,) = (cluster / "calls").read_text().splitlines()
    assert call.endswith("--context=prod get llmservices.goodput.dev/chat -n team -o json")


def test_status_of_a_namespace_has_a_line_for_each_service(cluster: Path) -> None:
    done = run(cluster, "status")
    (line,) = [line for line in done.stdout.splitlines() if "chat" in line]
    assert line.split()[:4] == ["team", "chat", "Serving", "2/3"]
    (found,) = json.loads(run(cluster, "status", "-A", "--json").stdout)
    assert (found["name"], found["goodput"], found["token_budget"]) == ("chat", "4.61", 1536)
    assert "--all-namespaces" in (cluster / "calls").read_text()
    write(cluster, services={"items": []})
    empty = run(cluster, "status")
    assert (empty.returncode, empty.stdout) == (0, "")
    assert "-A shows those of all namespaces" in empty.stderr


def test_why_shows_decisions_with_the_inputs_of_the_operators_log(cluster: Path) -> None:
    done = run(cluster, "why", "chat")
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert "2026-11-27T02:40:10Z  Replicas: Demand\n" in text
    assert "2026-11-27T02:30:00Z  Replicas: Demand (recommended, not applied)\n" in text
    assert "4.70 requests/s over 10 s (fresh), 9 in flight" in text
    assert "class interactive: TTFT missed by 3 of 40, TPOT missed by 0 of 40" in text
    assert "8 running, 4 waiting, KV 30%" in text
    found = json.loads(run(cluster, "why", "chat", "--json").stdout)
    assert [one["inputs"] for one in found["decisions"]] == [INPUTS, None]
    assert found["problem"] is None


def test_why_reads_the_log_from_the_oldest_decision_on(cluster: Path) -> None:
    run(cluster, "why", "chat")
    calls = (cluster / "calls").read_text()
    assert " --since-time=2026-11-27T02:29:00+00:00 " in calls
    decided = {**SERVICE, "status": {}}
    write(cluster, service=decided)
    (cluster / "calls").unlink()
    assert "have not changed anything" in run(cluster, "why", "chat").stderr
    assert "logs" not in (cluster / "calls").read_text()


def test_why_says_that_the_log_cannot_be_read_and_still_shows_decisions(cluster: Path) -> None:
    write(cluster, deployments={"items": []})
    done = run(cluster, "why", "chat")
    assert done.returncode == 0
    assert "Replicas: Demand" in done.stdout
    assert "cannot be read: no operator of the chart was found" in done.stderr


def judged(*, status: dict[str, Any] | None = None, **gate: Any) -> dict[str, Any]:
    """Return a service whose spec a gate has judged, with other fields of status and gate."""
    found = {
        "observedGeneration": 3,
        "updateRevision": "chat-2",
        "failedRevision": "chat-2",
        "gate": {**SERVICE["status"]["gate"], **gate},
    }
    return {**SERVICE, "status": {**found, **(status or {})}}


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({"observedGeneration": 2}, "the operator has not yet read generation 3 of the spec"),
        (
            {"updateRevision": "chat-3"},
            "it judged chat-2, and the revision of the spec is chat-3",
        ),
        (
            {"conditions": [{"type": "Stalled", "status": "True", "reason": "InvalidSpec"}]},
            "the spec is rejected (InvalidSpec)",
        ),
        (
            {"conditions": [{"type": "Stalled", "status": "True", "reason": "NotBuilt"}]},
            "the spec is rejected (NotBuilt)",
        ),
    ],
    ids=["not yet read", "another revision", "invalid", "not built"],
)
def test_the_verdict_on_another_spec_is_no_exit_code(
    cluster: Path, status: dict[str, Any], reason: str
) -> None:
    write(cluster, service=judged(status=status, verdict="PASS", phase="Passed"))
    assert run(cluster, "gate", "chat").returncode == 0
    done = run(cluster, "gate", "chat", "--exit-code")
    assert done.returncode == 64
    assert "PASS" in done.stdout
    assert done.stderr.endswith(f"says nothing about its spec: {reason}\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("verdict", "code"), [("PASS", 0), ("FAIL", 1), ("INCONCLUSIVE", 2), ("INVALID", 3), (None, 64)]
)
def test_gate_exits_with_the_verdict_only_if_asked(
    cluster: Path, verdict: str | None, code: int
) -> None:
    write(cluster, service=judged(verdict=verdict))
    plain = run(cluster, "gate", "chat")
    assert plain.returncode == 0
    assert "pvc://runs/chat-2/report.html" in plain.stdout
    assert all(line == line.rstrip() for line in plain.stdout.splitlines()), "nothing is padded"
    done = run(cluster, "gate", "chat", "--exit-code", "--json")
    assert done.returncode == code
    assert json.loads(done.stdout)["failedRevision"] == "chat-2"
    ended = "ended without a verdict (BelowObjective); its message has the cause\n"
    assert done.stderr.endswith("" if verdict else ended)


def test_the_verdict_of_a_gate_in_progress_is_no_exit_code(cluster: Path) -> None:
    write(cluster, service=judged(phase="Replaying", verdict="PASS", pairs="1/4"))
    done = run(cluster, "gate", "chat", "--exit-code")
    assert done.returncode == 64
    assert "1/4" in done.stdout
    assert "has no verdict yet" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("status", "../chat"), 64, "'../chat' is not the name of an LLMService"),
        (("why",), 64, "see `kubectl goodput why --help`"),
        (("gat", "chat"), 64, "gate"),
        ((), 64, "see `kubectl goodput --help`"),
        (("status", "chat", "-A"), 64, "name the namespace of chat with -n"),
        (("gate", "chat"), 64, "has had no gate"),
    ],
)
def test_an_error_is_a_sentence_with_exit_code_64(
    cluster: Path, arguments: tuple[str, ...], code: int, sentence: str
) -> None:
    write(cluster, service={**SERVICE, "status": {}})
    done = run(cluster, *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ('echo "Error from server (NotFound): none" >&2; exit 1', "LLMService chat does not exist"),
        ('echo "The connection was refused" >&2; exit 1', "kubectl: The connection was refused"),
        ("exit 1", "kubectl: failed without a message"),
        ("echo nonsense", "something else than JSON"),
        ("echo []", "something else than a JSON object"),
    ],
)
def test_a_failure_of_kubectl_is_a_sentence(cluster: Path, script: str, sentence: str) -> None:
    (cluster / "kubectl").write_text(f"#!/bin/sh\n{script}\n")
    done = run(cluster, "status", "chat")
    assert done.returncode == 64
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_missing_kubectl_is_named(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(
        [PLUGIN, "status"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 64
    assert "kubectl is missing: install it" in done.stderr


def test_equal_decisions_have_the_inputs_of_their_own_times() -> None:
    log = [{**LOG[0], "inputs": {"arrivals": number}} for number in (1, 2, 3)]
    views = decision_views(SERVICE, log)
    assert [one["inputs"]["arrivals"] for one in views] == [3, 2]


@pytest.mark.parametrize("inputs", [{}, {"interval_seconds": 0}, {"classes": [{"name": "a"}]}])
def test_inputs_of_another_version_are_shown_as_far_as_they_are_known(
    inputs: dict[str, Any],
) -> None:
    assert input_lines(inputs) == ["replicas: none"]


@pytest.mark.parametrize(
    ("known", "line"),
    [
        (
            {"measured_replicas": 0},
            "replicas: 2 ready of 1 to 8; no readings of running and queued requests",
        ),
        (
            {"measured_replicas": 2, "kv_total_blocks": 0, "preemptions": None},
            "replicas: 2 ready of 1 to 8; 8 running, 4 waiting, KV unknown, unknown preemptions",
        ),
    ],
    ids=["no page", "another version"],
)
def test_readings_that_a_server_does_not_publish_are_shown_as_unknown(
    known: dict[str, Any], line: str
) -> None:
    assert line in input_lines({**INPUTS, **known})


def test_the_load_is_that_of_the_time_between_two_readings() -> None:
    before = {"epoch": "a", "step_ns": 10**9, "output_tokens": 100}
    after = {"epoch": "a", "step_ns": 2 * 10**9, "output_tokens": 300, "kv_total_blocks": 10,
             "kv_free_blocks": 4, "running": 3, "waiting": 0}  # fmt: skip
    load = load_view("chat-0", "engine", before, after, 2.0)
    assert (load["busy_ratio"], load["output_tokens_per_s"]) == (0.5, 100)
    assert load["kv_used_ratio"] == 0.6
    restarted = load_view("chat-0", "engine", before, {**after, "epoch": "b"}, 2.0)
    assert restarted["output_tokens_per_s"] is None
    first, last = (
        {"epoch": "a", "arrivals": n, "outcomes": {"c": {"attained": n}}} for n in (1, 5)
    )
    assert load_view("chat-0", "engine", {}, {"running": 3}, 1.0)["busy_ratio"] is None
    router = load_view("chat-router", "router", first, last, 2.0)
    assert (router["arrivals_per_s"], router["goodput_per_s"]) == (2, 2)


def test_top_reads_other_servers_from_their_metrics_and_names_pods_without_a_load(
    cluster: Path,
) -> None:
    def pod(name: str, role: str, **annotations: str) -> dict[str, Any]:
        labels = {"goodput.dev/role": role}
        named = {f"goodput.dev/{key}": value for key, value in annotations.items()}
        metadata = {"name": name, "namespace": "team", "labels": labels, "annotations": named}
        return {"metadata": metadata, "status": {"phase": "Running"}}

    pods = [
        pod("chat-vllm", "engine", runtime="vLLM", metrics=":8000/metrics"),
        pod("chat-lying", "engine", runtime="vLLM", metrics=":8000/nothing"),
        pod("chat-other", "engine", runtime="OpenAI"),
        pod("chat-router", "router"),
    ]
    state = {"epoch": "a", "in_flight": 4, "arrivals": 9}
    write(cluster, pods={"items": pods}, state=state)
    page = "vllm:num_requests_running 3\nvllm:num_requests_waiting 2\n"
    (cluster / "metrics").write_text(page, encoding="utf-8")
    (cluster / "nothing").write_text("<html>", encoding="utf-8")
    done = run(cluster, "top", "chat", "--json")
    assert done.returncode == 0, done.stderr
    router, engine = json.loads(done.stdout)
    assert (router["pod"], router["in_flight"]) == ("chat-router", 4)
    assert (engine["pod"], engine["running"], engine["waiting"]) == ("chat-vllm", 3, 2)
    unknown = ("kv_used_ratio", "busy_ratio", "output_tokens_per_s")
    assert [engine[name] for name in unknown] == [None, None, None]
    assert "chat-lying does not respond with its load\n" in done.stderr
    assert "chat-other has no metrics page; name one with runtime.metricsPath\n" in done.stderr
    assert "/pods/chat-vllm:8000/proxy/metrics" in (cluster / "calls").read_text()
