"""Tenants at the router: keys, shares under overload, metrics."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from tests.engine.router.conftest import END, TOKEN, until

from goodput_core.errors import UsageError
from goodput_core.slo.targets import SLOClass
from goodput_core.tenants.tenant_list import Tenant, format_tenants, hash_key
from goodput_core.units import NS_PER_S
from goodput_engine.router.command import main
from goodput_engine.router.tenants import read_workload

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.router.conftest import Call, RouterBench, StartBench

KEYS = {"a": "key-of-a", "b": "key-of-b", "flood": "key-of-flood"}
BODY = b'{"prompt": "x", "stream": true, "max_tokens": 10}'
# Half a second without a first token is the begin of an overload.
TIGHT = SLOClass(name="interactive", ttft_ms=1000, tpot_ms=5_000)


def write(file: Path, *names: str) -> Path:
    rows = [Tenant(name=name, weight=1, hashes=(hash_key(KEYS[name]),)) for name in names]
    file.write_text(format_tenants(rows))
    return file


async def post(bench: RouterBench, tenant: str, body: bytes = BODY) -> tuple[int, bytes]:
    return await bench.post(body, Authorization=f"Bearer {KEYS.get(tenant, tenant)}")


@pytest.mark.parametrize("key", ["", "unknown", "x" * 7_000], ids=["missing", "unknown", "long"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_request_without_a_key_of_a_tenant_gets_401(
    start: StartBench, tmp_path: Path, key: str, path: str
) -> None:
    bench = await start(tenants_file=write(tmp_path / "tenants", "a"))
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    status, body = await bench.post(BODY, path=path, **headers)
    error = json.loads(body)["error"]
    assert (status, error["code"], error["type"]) == (
        401,
        "invalid_api_key",
        "invalid_request_error",
    )
    assert error["message"].startswith("the API key is not valid" if key else "no API key was sent")
    assert bench.router.outcomes.client_errors == 1
    async with bench.client.get(f"{bench.router.url}/v1/models", headers=headers) as response:
        assert response.status == 401
    assert not bench.replicas[0].calls


async def test_keys_are_replaced_without_a_restart_and_replicas_do_not_get_them(
    start: StartBench, tmp_path: Path
) -> None:
    now_ns = 0
    file = write(tmp_path / "tenants", "a")
    bench = await start(tenants_file=file, clock=lambda: now_ns)

    async def behave(call: Call) -> None:
        assert call.header("authorization") is None
        await call.whole("200 OK", b"{}")

    bench.replicas[0].behave = behave
    assert (await post(bench, "a"))[0] == 200
    write(tmp_path / "new", "b").replace(file)
    now_ns += NS_PER_S
    assert (await post(bench, "a"))[0] == 401
    assert (await post(bench, "b"))[0] == 200
    file.write_text("b not-a-hash")
    now_ns += NS_PER_S
    assert (await post(bench, "b"))[0] == 200


async def test_a_flood_gets_429_and_the_others_do_not(start: StartBench, tmp_path: Path) -> None:
    now_ns = 0
    bench = await start(
        tenants_file=write(tmp_path / "tenants", "a", "b", "flood"),
        interactive=TIGHT,
        clock=lambda: now_ns,
    )
    released = asyncio.Event()

    async def behave(call: Call) -> None:
        await released.wait()
        await call.stream_head()
        await call.chunk(TOKEN + END)
        await call.end()

    replica = bench.replicas[0]
    replica.behave = behave
    tasks = [
        asyncio.create_task(post(bench, tenant))
        for tenant, count in (("a", 3), ("b", 2), ("flood", 8))
        for _ in range(count)
    ]
    await until(lambda: len(replica.calls) == 13)
    now_ns += NS_PER_S * 6 // 10
    async with bench.complete(
        data=BODY, headers={"Authorization": f"Bearer {KEYS['flood']}"}
    ) as response:
        assert response.status == 429
        assert response.headers["Retry-After"] == "1"
        error = json.loads(await response.read())["error"]
        assert error["type"] == "rate_limit_error"
        assert "more than its share" in error["message"]
    tasks += [asyncio.create_task(post(bench, tenant)) for tenant in ("a", "b")]
    await until(lambda: len(replica.calls) == 15)
    released.set()
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 15
    assert (await post(bench, "flood"))[0] == 200
    metrics = await bench.metrics()
    for line in (
        'goodput_router_tenant_throttled_total{llmservice="chat",tenant="flood"} 1.0',
        'goodput_router_tenant_throttled_total{llmservice="chat",tenant="a"} 0.0',
        'goodput_router_tenant_requests_total{llmservice="chat",outcome="shed",tenant="flood"} 1.0',
        'goodput_router_tenant_requests_total{llmservice="chat",outcome="attained",tenant="a"} 4.0',
        'goodput_router_tenant_output_tokens_total{llmservice="chat",tenant="b"} 3.0',
        'goodput_router_tenant_weight{llmservice="chat",tenant="b"} 1.0',
    ):
        assert line in metrics


async def test_at_most_a_hundred_tenants_have_series_of_their_own(
    start: StartBench, tmp_path: Path
) -> None:
    file = tmp_path / "tenants"
    rows = [Tenant(name=f"t{n}", weight=1, hashes=(hash_key(f"key-{n}"),)) for n in range(150)]
    file.write_text(format_tenants(rows))
    bench = await start(tenants_file=file)

    async def behave(call: Call) -> None:
        await call.whole("200 OK", b"{}")

    bench.replicas[0].behave = behave
    for number in (99, 100, 149):
        assert (await post(bench, f"key-{number}"))[0] == 200
    series = [
        line
        for line in (await bench.metrics()).splitlines()
        if line.startswith("goodput_router_tenant_throttled_total")
    ]
    assert len(series) == 101
    assert 'throttled_total{llmservice="chat",tenant="other"} 0.0' in "\n".join(series)


@pytest.mark.parametrize(
    ("body", "prompt", "most", "streamed"),
    [
        (b'{"prompt": [1, 2, 3], "max_tokens": 7}', 3, 7, False),
        (b'{"prompt": "' + b"word " * 100 + b'", "stream": true}', 133, None, True),
        (b'{"prompt": ["a", "b"], "max_completion_tokens": 5, "n": 3}', 15, 15, False),
        (b'{"max_tokens": 99999999999999999999}', 10, 1 << 24, False),
        (b'{"max_tokens": -5, "n": -1}', 7, 1, False),
        (b"not JSON", 3, None, False),
        (b"[" * 10_000, 2501, None, False),
        (b"", 1, None, False),
    ],
)
def test_the_work_of_a_request_is_read_from_its_body(
    body: bytes, prompt: int, most: int | None, streamed: bool
) -> None:
    work = read_workload(body)
    assert (work.prompt_tokens, work.max_output_tokens, work.streamed) == (prompt, most, streamed)


def test_a_router_has_tenants_or_plain_keys() -> None:
    with pytest.raises(UsageError, match="--api-key-file and --tenants exclude each other"):
        main(["-f", "x", "--upstream", "r=http://[::1]:1", "--api-key-file", "k", "--tenants", "t"])
