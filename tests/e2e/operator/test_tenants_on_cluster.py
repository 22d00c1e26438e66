"""Tenants of a service, whose keys are in a Secret of the cluster.

One tenant floods the service during all tests of this module. Meanwhile keys are added and removed,
and the other tenant sends requests that must be served in time.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml
from tools.cluster.handle import wait_for
from tools.e2e.installation import CHAT, ChartRelease

from goodput_core.contract import (
    METRIC_TENANT_OUTPUT_TOKENS,
    METRIC_TENANT_THROTTLED,
    PATH_METRICS,
)
from goodput_core.errors import ExitCode
from goodput_core.slo.judging import JudgementKind
from goodput_core.slo.record import Outcome
from goodput_core.tenants.tenant_list import Tenant, format_tenants, hash_key
from goodput_replay.runs.record_rows import read_judged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.cluster.handle import OwnCluster

NAME: Final = "tenants"
SECRET: Final = "tenants-of-chat"
CLASSES: Final = [{"name": "interactive", "ttftMs": 2000, "tpotMs": 200, "objective": "90%"}]
PLACES: Final = 10
LENGTHS: Final = {"calm": (64, 30), "flood": (64, 150)}
"""Prompt and output tokens. With outputs of the flood, the engine completes about 8 requests per
second, so that without shares a request would wait for five seconds after six seconds."""
PER_S: Final = {"calm": 2, "flood": 16}
JUDGED: Final = 15
"""Requests of the calm tenant after which the replays are stopped."""


@dataclass(frozen=True, kw_only=True)
class TenantsBench:
    """A service with tenants, one of which floods it."""

    installation: ChartRelease
    url: str
    folder: Path
    replays: dict[str, subprocess.Popen[str]]

    def write(self, **keys: str) -> None:
        """Replace the Secret: the tenants and their keys."""
        rows = [Tenant(name=name, weight=1, hashes=(hash_key(key),)) for name, key in keys.items()]
        write_secret(self.installation, format_tenants(rows))
        self.sync()

    def sync(self) -> None:
        """Make the kubelet update the pod's volumes, which it otherwise does once a minute."""
        words = ("annotate", "pod", self.router["metadata"]["name"], f"at={time.monotonic_ns()}")
        self.installation.kubectl(*words, "--overwrite")

    @property
    def router(self) -> dict[str, Any]:
        (pod,) = self.installation.pods(NAME, "router")
        return pod

    def get(self, *requests: tuple[str, ...], path: str = "/v1/models") -> list[tuple[int, str]]:
        """Return status and error code of requests with these keys, each in its own header."""
        words = ["curl", "--silent", "--max-time", "5"]
        for keys in requests:
            headers = [word for key in keys for word in ("-H", f"Authorization: Bearer {key}")]
            words += [*headers, "-w", "\\n%{http_code}\\n", self.url + path, "--next"]
        lines = self.installation.run_inside(*words[:-1]).splitlines()
        return [
            (int(status), json.loads(body).get("error", {}).get("code", ""))
            for body, status in zip(lines[::2], lines[1::2], strict=True)
        ]

    def accepts(self, key: str) -> bool:
        """True if a request with the key is served."""
        return self.get((key,))[0][0] == HTTPStatus.OK

    def stream(self, key: str, tokens: int) -> subprocess.Popen[str]:
        """Start a streamed completion."""
        body = {"model": NAME, "prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True}
        return subprocess.Popen(
            self.installation.client_command(
                *("curl", "--silent", "--no-buffer", "-H", f"Authorization: Bearer {key}"),
                *("--json", json.dumps({**body, "stream": True})),
                f"{self.url}/v1/completions",
            ),
            stdout=subprocess.PIPE,
            text=True,
        )


def write_secret(installation: ChartRelease, content: str) -> None:
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": SECRET},
        "stringData": {"tenants": content},
    }
    installation.kubectl("apply", "-f", "-", stdin=json.dumps(secret))


@pytest.fixture(scope="module")
def bench(
    installation: ChartRelease,
    own_cluster: OwnCluster,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[TenantsBench]:
    """The service, with a flood that has begun."""
    folder = tmp_path_factory.mktemp("tenants")
    slo = folder / "slo.yaml"
    manifest = yaml.safe_load(CHAT.read_text(encoding="utf-8"))
    manifest["spec"]["slo"] = {"classes": CLASSES, "default": "interactive"}
    slo.write_text(yaml.safe_dump(manifest), encoding="utf-8")
    installation.apply(
        NAME,
        replicas=1,
        engine={**manifest["spec"]["engine"], "maxNumSeqs": PLACES, "drainSeconds": 1},
        router={"replicas": 1, "drainSeconds": 1, "tenantsSecret": {"name": SECRET}},
        slo=manifest["spec"]["slo"],
        control={"mode": "Manual", "intervalSeconds": 1},
    )
    installation.wait("create", f"service/{NAME}")
    # The Secret is created after the service, whose router exits until it has tenants.
    bench = TenantsBench(
        installation=installation,
        url=f"http://{installation.get('service', NAME)['spec']['clusterIP']}",
        folder=folder,
        replays={},
    )
    bench.write(calm="key-of-calm", flood="key-of-flood", third="key-of-third")
    installation.wait_settled(NAME)
    wait_for(lambda: bench.accepts("key-of-calm"), "the service is reachable", 60)
    for tenant in ("flood", "calm"):
        prompt, output = LENGTHS[tenant]
        command = installation.client_command(
            *(str(Path(sys.executable).parent / "replay"), "--yes", "--target", bench.url),
            *("--slo", str(slo), "--header", f"Authorization: Bearer key-of-{tenant}"),
            *("--rate", f"{PER_S[tenant]}/s", "--duration", "5m"),
            *("--input-tokens", str(prompt), "--output-tokens", str(output)),
            *("--out", str(folder / tenant)),
        )
        bench.replays[tenant] = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    yield bench
    for replay in bench.replays.values():
        with replay:
            replay.kill()
    installation.kubectl("delete", f"llmservice/{NAME}", f"secret/{SECRET}")
    installation.wait_deleted(NAME)


@pytest.mark.slow
def test_only_requests_with_a_key_of_the_secret_are_served(bench: TenantsBench) -> None:
    valid = "key-of-third"
    served, *rejected = bench.get(
        (valid,), (), ("wrong",), (valid, valid), (hash_key(valid).hex(),)
    )
    rejected += bench.get((), path=f"/v1/models?api_key={valid}")
    assert served == (200, "")
    assert rejected == [(401, "invalid_api_key")] * 5


@pytest.mark.slow
def test_a_refused_request_of_the_flood_gets_429_and_the_time_of_a_retry(
    bench: TenantsBench,
) -> None:
    def refused() -> str:
        body = json.dumps({"model": NAME, "prompt": [1, 2, 3], "max_tokens": 1})
        headers = ("--dump-header", "-", "-H", "Authorization: Bearer key-of-flood")
        url = f"{bench.url}/v1/completions"
        output = bench.installation.run_inside("curl", "--silent", *headers, "--json", body, url)
        return output if output.startswith("HTTP/1.1 429") else ""

    head, _, body = wait_for(refused, "a request of the flood is refused").partition("\n{")
    assert "\nretry-after: 1\n" in head.lower()
    assert '"rate_limit_error"' in body
    assert "more than its share" in body


@pytest.mark.slow
def test_keys_are_replaced_without_a_restart_and_an_invalid_secret_is_reported(
    bench: TenantsBench,
) -> None:
    installation = bench.installation
    before = bench.router
    epoch = installation.state(before["metadata"]["name"])["epoch"]
    running = bench.stream("key-of-third", 1000)
    assert running.stdout is not None
    assert running.stdout.readline().startswith("data: "), "it was admitted beside the flood"

    bench.write(calm="key-of-calm", flood="key-of-flood", third="new-key-of-third")
    wait_for(lambda: bench.accepts("new-key-of-third"), "the new key is valid", 60)
    assert not bench.accepts("key-of-third")
    assert running.poll() is None, "the response still runs"

    lines = [f"third sha256:{hash_key('new-key-of-third').hex()}", "calm secret-key-of-calm"]
    write_secret(installation, "\n".join(lines))
    bench.sync()
    wait_for(
        lambda: installation.condition(NAME, "Stalled")[0] == "TenantsNotReplaced",
        "the status reports the invalid Secret",
        60,
    )
    message = installation.condition(NAME, "Stalled")[1]
    assert re.search(rf"Secret {SECRET}, key tenants: .* line 2: ", message), message
    assert "secret-key" not in message
    assert installation.condition(NAME, "Ready")[0] == "Serving"
    assert bench.accepts("key-of-calm"), "the last valid tenants stay in use"
    bench.write(calm="key-of-calm", flood="key-of-flood", third="new-key-of-third")
    wait_for(
        lambda: installation.condition(NAME, "Stalled")[0] == "Unhindered",
        "the status reports the corrected Secret",
        60,
    )

    output, _ = running.communicate(timeout=120)
    assert output.rstrip().endswith("data: [DONE]"), "the response was not disturbed"
    after = bench.router
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["containerStatuses"] == before["status"]["containerStatuses"]
    assert installation.state(after["metadata"]["name"])["epoch"] == epoch


@pytest.mark.slow
def test_a_flood_gets_429_and_the_other_tenant_meets_its_targets(bench: TenantsBench) -> None:
    def counted(metric: str) -> dict[str, float]:
        page = bench.installation.read_admin(bench.router, PATH_METRICS)
        found = re.findall(rf'{metric}{{.*tenant="(\w+)"}} ([\d.]+)', page)
        return {tenant: float(count) for tenant, count in found}

    wait_for(
        lambda: counted(METRIC_TENANT_OUTPUT_TOKENS)["calm"] > JUDGED * LENGTHS["calm"][1],
        "requests of the calm tenant have ended",
    )
    throttled = counted(METRIC_TENANT_THROTTLED)
    for replay in bench.replays.values():
        replay.send_signal(signal.SIGINT)
    for replay in bench.replays.values():
        output, _ = replay.communicate(timeout=120)
        assert replay.returncode == ExitCode.INTERRUPTED, output
    rows = {
        tenant: [
            one
            for one in read_judged(bench.folder / tenant)
            if one.record.detail != "the run was stopped"
        ]
        for tenant in bench.replays
    }
    calm, flood = (Counter(one.record.outcome for one in rows[name]) for name in ("calm", "flood"))
    assert set(calm) == {Outcome.OK}, calm
    kinds = [one.judgement.kind for one in rows["calm"] if one.judgement is not None]
    in_time = kinds.count(JudgementKind.ATTAINED)
    assert in_time >= 0.9 * len(kinds) >= 0.9 * JUDGED, f"{in_time} of {len(kinds)} in time"
    assert set(flood) == {Outcome.OK, Outcome.SHED}, flood
    assert flood[Outcome.SHED] > flood[Outcome.OK], "the engine was overloaded"
    assert throttled["flood"] > 0
    assert throttled["calm"] == throttled["third"] == 0
