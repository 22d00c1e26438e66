"""`goodput wait` exits with the verdict of a TraceReplay, and with 64 without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from goodput_core.dispatch import run_command
from goodput_core.errors import InputError, UnreachableError, UsageError
from goodput_operator.kube.client import FailedCall
from goodput_operator.wait import exit_code_of, parse_resource, wait_for_end

if TYPE_CHECKING:
    from goodput_operator.kube.client import ApiResponse

WHERE = "TraceReplay night in namespace team"
MISSING = FailedCall(status=404, reason="NotFound", message="not found")
DOWN = FailedCall(status=0, reason="Unreachable", message="connection refused")


def replay(verdict: str | None, *, gated: bool = True) -> dict[str, Any]:
    status = {} if verdict is None else {"verdict": verdict}
    return {"spec": {"gate": {}} if gated else {}, "status": status}


async def wait(*responses: ApiResponse, timeout_ns: int | None = None) -> object:
    remaining = list(responses)

    async def read() -> ApiResponse:
        return remaining.pop(0) if len(remaining) > 1 else remaining[0]

    return await wait_for_end(read, where=WHERE, timeout_ns=timeout_ns, poll_s=0)


@pytest.mark.parametrize(
    ("verdict", "gated", "code"),
    [
        ("PASS", True, 0),
        ("FAIL", True, 1),
        ("INCONCLUSIVE", True, 2),
        ("INVALID", True, 3),
        ("FAIL", False, 0),
        ("INVALID", False, 3),
    ],
)
def test_the_exit_code_is_that_of_the_verdict(verdict: str, gated: bool, code: int) -> None:
    assert exit_code_of(replay(verdict, gated=gated)) == code


async def test_the_wait_ends_with_the_verdict_and_outlasts_an_outage() -> None:
    ended = replay("PASS")
    assert await wait(replay(None), DOWN, replay(None), ended) == ended


async def test_a_replay_that_is_missing_or_deleted_is_named() -> None:
    with pytest.raises(InputError, match=f"{WHERE} does not exist"):
        await wait(MISSING)
    with pytest.raises(InputError, match=f"{WHERE} was deleted before its end"):
        await wait(replay(None), MISSING)


async def test_a_cluster_that_is_unreachable_from_the_start_is_an_error() -> None:
    with pytest.raises(UnreachableError, match="connection refused"):
        await wait(DOWN)


async def test_a_right_that_was_taken_away_is_an_error_at_once() -> None:
    forbidden = FailedCall(status=403, reason="Forbidden", message="user cannot get")
    with pytest.raises(UnreachableError, match="user cannot get"):
        await wait(replay(None), forbidden)


async def test_the_time_limit_is_an_error_of_usage() -> None:
    with pytest.raises(UsageError, match="has no verdict after 1 ms"):
        await wait(replay(None), timeout_ns=1_000_000)


def test_resources_are_named_as_for_kubectl() -> None:
    names = [f"{kind}/night" for kind in ("trp", "tracereplay", "TraceReplay", "tracereplays")]
    assert [parse_resource(text) for text in names] == ["night"] * 4


@pytest.mark.parametrize("text", ["night", "llmsvc/chat", "trp/", "trp/a/b"])
def test_other_resources_are_rejected(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["wait", text]) == 64
    assert "write trp/NAME" in capsys.readouterr().err


def test_without_a_cluster_the_exit_code_is_not_that_of_a_verdict(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["wait", "trp/night", "--kubeconfig", str(tmp_path / "absent")]
    assert run_command(command) == 64
    assert "not a usable kubeconfig" in capsys.readouterr().err
