"""Several processes of a router count as one."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.engine.router.test_command import pipe, router

from goodput_core.contract import (
    METRIC_ROUTER_REPLICA_UP,
    METRIC_TENANT_THROTTLED,
    METRIC_TENANT_WEIGHT,
)
from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import Targets
from goodput_core.units import NS_PER_S
from goodput_engine.openai.headers import RequestSLO
from goodput_engine.request_bodies import MemoryLimit
from goodput_engine.router.merging import merge_metrics, merge_states
from goodput_engine.router.outcomes import OutcomeCounts
from goodput_engine.router.proxied_request import ProxiedRequest


def state(in_flight: int, seconds: dict[str, Any], **replica: Any) -> dict[str, Any]:
    view = {"name": "r0", "ready": True, "detail": "", "draining": False, "saturated": False}
    return {
        "role": "router",
        "epoch": "e",
        "uptime_seconds": 1.0,
        "draining": False,
        "arrivals": 5,
        "in_flight": in_flight,
        "client_errors": 1,
        "judged_on_e2e_only": 0,
        "outcomes": {"chat": {"attained": 2, "missed": 1}},
        "promises": {"chat": {"ttft": {"judged": 3, "missed": 1, "close": 0}}},
        "retries": {"lost": 1},
        "tenants_problem": "",
        "replicas": [{**view, "in_flight": in_flight, "kv_free_blocks": 7, **replica}],
        "seconds": seconds,
    }


def test_counts_are_added_up_and_a_replica_is_ready_if_it_is_for_all() -> None:
    quiet: dict[str, Any] = {"first_s": 10, "end_s": 12, "classes": {}}
    second = state(3, quiet, ready=False, detail="HTTP 500", saturated=True)
    second["promises"] = {}
    second["tenants_problem"] = "line 3: it is invalid"
    merged = merge_states([state(2, quiet), second])
    assert "epoch" not in merged
    assert (merged["arrivals"], merged["in_flight"], merged["client_errors"]) == (10, 5, 2)
    assert merged["outcomes"] == {"chat": {"attained": 4, "missed": 2}}
    assert merged["promises"] == {"chat": {"ttft": {"judged": 3, "missed": 1, "close": 0}}}
    assert merged["retries"] == {"lost": 2}
    assert merged["tenants_problem"] == "line 3: it is invalid"
    (replica,) = merged["replicas"]
    assert not replica["ready"]
    assert replica["saturated"]
    assert (replica["detail"], replica["in_flight"]) == ("HTTP 500", 5)
    assert replica["kv_free_blocks"] == 7


def test_seconds_are_added_up_to_the_last_one_that_is_complete_everywhere() -> None:
    early = {"first_s": 10, "end_s": 14, "classes": {"chat": {"good": [1] * 4, "total": [2] * 4}}}
    late = {"first_s": 12, "end_s": 13, "classes": {"batch": {"good": [0], "total": [5]}}}
    assert merge_states([state(0, early), state(0, late)])["seconds"] == {
        "first_s": 10,
        "end_s": 13,
        "classes": {
            "chat": {"good": [1, 1, 1], "total": [2, 2, 2]},
            "batch": {"good": [0, 0, 0], "total": [0, 0, 5]},
        },
    }


def test_metrics_are_those_of_one_router_with_all_requests() -> None:
    def counted(*requests: int) -> CollectorRegistry:
        registry = CollectorRegistry()
        outcomes = OutcomeCounts(registry, llmservice="chat", classes=["chat"])
        for e2e_s in requests:
            slo = RequestSLO(slo_class="chat", targets=Targets(e2e_ns=2 * NS_PER_S))
            request = ProxiedRequest(0, slo, MemoryLimit(1).reserve(), uploaded=True)
            request.outcome = Outcome.OK
            outcomes.begin()
            outcomes.settle(request, e2e_s * NS_PER_S)
        return registry

    def samples(text: bytes) -> dict[tuple[str, str], float]:
        return {
            (sample.name, str(sample.labels)): sample.value
            for family in text_string_to_metric_families(text.decode())
            for sample in family.samples
        }

    parts = [generate_latest(counted(1, 3)), generate_latest(counted(2, 5, 60))]
    merged = merge_metrics([part.decode() for part in parts])
    assert samples(merged) == samples(generate_latest(counted(1, 3, 2, 5, 60)))
    up = f'# TYPE {METRIC_ROUTER_REPLICA_UP} gauge\n{METRIC_ROUTER_REPLICA_UP}{{replica="r"}} '
    assert samples(merge_metrics([f"{up}1.0\n", f"{up}0.0\n"])).popitem()[1] == 0


def test_tenants_have_their_weight_and_only_those_of_all_processes_have_series() -> None:
    def text(*tenants: str) -> str:
        lines = [f"# TYPE {METRIC_TENANT_WEIGHT} gauge"]
        lines += [f'{METRIC_TENANT_WEIGHT}{{tenant="{name}"}} 3.0' for name in tenants]
        counter = METRIC_TENANT_THROTTLED.removesuffix("_total")
        lines += [f"# TYPE {counter} counter"]
        lines += [f'{counter}_total{{tenant="{name}"}} 2.0' for name in (*tenants, "other")]
        return "\n".join(lines) + "\n"

    merged = merge_metrics([text("a", "removed"), text("a")]).decode()
    assert f'{METRIC_TENANT_WEIGHT}{{tenant="a"}} 3.0' in merged
    assert "removed" not in merged
    assert merged.count('{tenant="a"} 4.0') == merged.count('{tenant="other"} 4.0') == 1


def test_processes_on_one_port_appear_as_one_router_and_end_with_the_first_of_them() -> None:
    with router("--processes", "2") as (process, event):
        url, admin_url = event["url"], event["admin_url"]

        def complete(number: int) -> int:
            request = urllib.request.Request(f"{url}/v1/completions", b'{"prompt":"x"}')
            request.add_header("X-SLO-Class", "batch" if number % 2 else "interactive")
            try:
                urllib.request.urlopen(request).close()
            except urllib.error.HTTPError as error:
                error.close()
                return error.code
            return 200

        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(complete, range(40))) == {503}  # no replica is ready
        with urllib.request.urlopen(f"{admin_url}/control/state?seconds_since=0") as answer:
            merged = json.load(answer)
        assert merged["arrivals"] == 40
        assert {name: one["shed"] for name, one in merged["outcomes"].items()} == {
            "interactive": 20,
            "batch": 20,
        }
        with urllib.request.urlopen(f"{admin_url}/metrics") as answer:
            text = answer.read().decode()
        assert "goodput_router_arrivals_total" in text
        (version,) = [line for line in text.splitlines() if line.startswith("goodput_build_info{")]
        assert version.endswith(" 1.0"), "two processes are one router of one version"
        (started,) = [line for line in text.splitlines() if line.startswith("process_start_time")]
        assert abs(time.time() - float(started.split()[1])) < 600, "not a sum of times"
        children = psutil.Process(process.pid).children()
        shares = []
        for child in children:
            ports = {c.laddr.port for c in child.net_connections() if c.status == "LISTEN"}
            (own,) = ports - {int(str(url).rpartition(":")[2])}
            with urllib.request.urlopen(f"http://127.0.0.1:{own}/control/state") as answer:
                shares.append(json.load(answer)["arrivals"])
        assert sum(shares) == 40
        assert min(shares) > 0
        children[0].kill()
        assert process.wait(timeout=10) == 70
        assert "ended by SIGKILL" in pipe(process.stderr).read()
        assert not children[1].is_running()
