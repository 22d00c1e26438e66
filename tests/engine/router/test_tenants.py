"""Tenants at the router: keys, shares under overload, metrics."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import TYPE_CHECKING

import pytest
from multidict import CIMultiDict
from tests.engine.router.conftest import END, TOKEN, respond, until

from goodput_core.errors import UsageError
from goodput_core.slo.targets import SLOClass
from goodput_core.tenants.tenant_list import Tenant, format_tenants, hash_key
from goodput_core.units import NS_PER_S
from goodput_engine.router.command import main
from goodput_engine.router.tenants import read_workload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
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


@pytest.mark.parametrize(
    ("path", "sent", "message"),
    [
        ("", [("Authorization", "Bearer key-of-a")] * 2, "more than one header Authorization"),
        ("", [("Authorization", "Bearer key-of-a, Bearer key-of-b")], "is not valid"),
        ("", [("Authorization", "Bearer   ")], "no API key"),
        ("", [("Authorization", "Basic key-of-a")], "no API key"),
        ("", [("Authorization", "Bearer key-of-a\u00e9\u2603")], "is not valid"),
        ("?api_key=key-of-a", [("X-API-Key", "key-of-a")], "no API key"),
        ("?api_key=key-of-a", [("Authorization", "Bearer " + "k" * 7_000)], "is not valid"),
    ],
    ids=["two headers", "two keys", "empty", "Basic", "not ASCII", "elsewhere", "long and query"],
)
async def test_a_key_counts_only_in_one_header(
    start: StartBench, tmp_path: Path, path: str, sent: list[tuple[str, str]], message: str
) -> None:
    bench = await start(tenants_file=write(tmp_path / "tenants", "a", "b"))
    url = f"{bench.router.url}/v1/completions{path}"
    async with bench.client.post(url, data=BODY, headers=CIMultiDict(sent)) as response:
        error = json.loads(await response.read())["error"]
        assert (response.status, error["code"]) == (401, "invalid_api_key")
    assert message in error["message"]
    assert "key-of-" not in json.dumps(error)
    assert not bench.replicas[0].calls


async def test_a_head_that_is_too_large_for_any_key_is_rejected(
    start: StartBench, tmp_path: Path
) -> None:
    bench = await start(tenants_file=write(tmp_path / "tenants", "a"))
    status, body = await post(bench, "k" * 100_000)
    assert status == 400
    assert "kkk" not in json.loads(body)["error"]["message"]
    assert not bench.replicas[0].calls


async def test_replicas_get_no_key_from_another_header_or_the_query(
    start: StartBench, tmp_path: Path
) -> None:
    bench = await start(tenants_file=write(tmp_path / "tenants", "a"))
    key = KEYS["a"]
    url = f"{bench.router.url}/v1/completions?api_key={key}"
    headers = {"Authorization": f"bearer {key}", "X-API-Key": key, "Api-Key": key, "X-Other": "1"}
    bench.replicas[0].behave = respond("200 OK", b"{}")
    async with bench.client.post(url, data=BODY, headers=headers) as response:
        assert response.status == 200
    (call,) = bench.replicas[0].calls
    assert call.path == "/v1/completions"
    assert call.header("X-Other") == "1"
    assert key not in str(call.headers)


HASH = f"sha256:{hash_key(KEYS['b']).hex()}"
INVALID = {
    "a key instead of its hash": (f"a {HASH}\nb secret-of-b", "line 2: a field is neither"),
    "without a hash": ("secret-of-b", "line 1: a tenant has 1 to 4 hashes"),
    "two tenants with one key": (f"a {HASH}\n\nb {HASH}", "line 3: the same hash is on line 1"),
    "a tenant twice": (
        f"secret-of-b {HASH}\nsecret-of-b {HASH}",
        "line 2: its tenant has a line already",
    ),
    "odd characters": (f'a"}}\x00\u2603secret-of-b {HASH}', "line 1: the name must have 1 to 40"),
    "a name of 300 characters": (f"{'secret-of-b' * 30} {HASH}", "line 1: the name must have"),
    "the reserved name": (f"other {HASH}", "line 1: the name must have"),
    "1,001 tenants": (
        "".join(f"t{n} sha256:{n:064x}\n" for n in range(1_001)),
        "line 1001: more than 1,000 tenants",
    ),
    "above 1 MiB": ("#" * (1 << 20) + "\n", "larger than 1 MiB"),
    "empty": ("", "no tenants"),
    "missing": (None, "No such file or directory"),
}


@pytest.mark.parametrize(("content", "problem"), INVALID.values(), ids=INVALID)
async def test_invalid_tenants_are_reported_without_a_key_and_the_last_valid_ones_stay(
    start: StartBench, tmp_path: Path, content: str | None, problem: str
) -> None:
    now_ns = 0
    file = write(tmp_path / "tenants", "a")
    valid = file.read_text()
    bench = await start(tenants_file=file, clock=lambda: now_ns)
    bench.replicas[0].behave = respond("200 OK", b"{}")
    assert (await bench.state())["tenants_problem"] == ""
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    now_ns += NS_PER_S
    reported = (await bench.state())["tenants_problem"]
    assert problem in reported
    assert "secret-of-b" not in reported
    assert HASH not in reported
    assert (await post(bench, "a"))[0] == 200
    file.write_text(valid)
    now_ns += NS_PER_S
    assert (await bench.state())["tenants_problem"] == ""
    assert 'tenant="a"' in await bench.metrics()


async def test_a_tenant_that_is_removed_while_its_body_arrives_gets_401(
    start: StartBench, tmp_path: Path
) -> None:
    now_ns = 0
    file = write(tmp_path / "tenants", "a", "b")
    bench = await start(tenants_file=file, clock=lambda: now_ns)
    arriving, rest = asyncio.Event(), asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield BODY[:10]
        arriving.set()
        await rest.wait()
        yield BODY[10:]

    headers = {"Authorization": f"Bearer {KEYS['b']}"}
    sending = asyncio.ensure_future(bench.complete(data=body(), headers=headers))
    await arriving.wait()
    await until(lambda: bench.router.outcomes.in_flight == 1)
    write(tmp_path / "new", "a").replace(file)
    now_ns += NS_PER_S
    await bench.state()
    rest.set()
    async with await sending as response:
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


async def test_the_series_of_other_tenants_takes_no_place_of_a_named_one(
    start: StartBench, tmp_path: Path
) -> None:
    now_ns = 0
    rows = [Tenant(name=f"t{n}", weight=1, hashes=(hash_key(f"key-{n}"),)) for n in range(102)]
    file = tmp_path / "tenants"
    file.write_text(format_tenants(rows[:101]))
    bench = await start(tenants_file=file, clock=lambda: now_ns)
    bench.replicas[0].behave = respond("200 OK", b"{}")
    assert (await post(bench, "key-100"))[0] == 200
    assert 'tenant="other"' in await bench.metrics()
    (tmp_path / "new").write_text(format_tenants([*rows[1:100], rows[101]]))
    (tmp_path / "new").replace(file)
    now_ns += NS_PER_S
    metrics = await bench.metrics()
    named = 'goodput_router_tenant_throttled_total{llmservice="chat",tenant="'
    assert metrics.count(named) == 101
    assert f'{named}t101"}} 0.0' in metrics


async def test_the_series_of_a_removed_tenant_end_and_its_last_response_counts_as_other(
    start: StartBench, tmp_path: Path
) -> None:
    now_ns = 0
    file = write(tmp_path / "tenants", "a", "b")
    bench = await start(tenants_file=file, clock=lambda: now_ns)
    released = asyncio.Event()

    async def behave(call: Call) -> None:
        await released.wait()
        await call.whole("200 OK", b"{}")

    bench.replicas[0].behave = behave
    running = asyncio.create_task(post(bench, "b"))
    await until(lambda: len(bench.replicas[0].calls) == 1)
    assert 'tenant="b"' in await bench.metrics()
    write(tmp_path / "new", "a", "flood").replace(file)
    now_ns += NS_PER_S
    metrics = await bench.metrics()
    assert 'tenant="b"' not in metrics
    assert 'goodput_router_tenant_weight{llmservice="chat",tenant="flood"} 1.0' in metrics
    released.set()
    assert (await running)[0] == 200
    metrics = await bench.metrics()
    assert 'tenant="b"' not in metrics
    requests = 'goodput_router_tenant_requests_total{llmservice="chat",outcome='
    others = [line for line in metrics.splitlines() if 'tenant="other"' in line]
    assert [line for line in others if line.startswith(requests) and line.endswith(" 1.0")]


async def test_a_compressed_body_is_not_counted_by_its_length_but_refused(
    start: StartBench, tmp_path: Path
) -> None:
    bench = await start(tenants_file=write(tmp_path / "tenants", "a"))
    bench.replicas[0].behave = respond("200 OK", b"{}")
    key = f"Bearer {KEYS['a']}"
    packed = gzip.compress(b'{"prompt": "' + b"word " * 100_000 + b'"}')
    status, text = await bench.post(packed, Authorization=key, Content_Encoding="gzip")
    error = json.loads(text)["error"]
    assert (status, error["param"]) == (415, "Content-Encoding")
    assert "send the body uncompressed" in error["message"]
    assert not bench.replicas[0].calls
    assert bench.router.outcomes.client_errors == 1
    assert (await bench.post(BODY, Authorization=key, Content_Encoding="identity"))[0] == 200
    two = [("Authorization", key), ("Content-Encoding", "identity"), ("Content-Encoding", "gzip")]
    async with bench.complete(data=packed, headers=CIMultiDict(two)) as response:
        assert response.status == 415


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
