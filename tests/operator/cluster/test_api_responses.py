"""Every response of the API server or of a proxy becomes a value."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from goodput_operator.kube.client import UNREACHABLE, FailedCall, parse_response
from goodput_operator.kube.managed_fields import Conflict


def failed_call(status: int, body: Any) -> FailedCall:
    response = parse_response(status, json.dumps(body).encode())
    assert isinstance(response, FailedCall)
    return response


def test_a_successful_response_is_the_object() -> None:
    assert parse_response(200, b'{"kind": "Pod"}') == {"kind": "Pod"}


def test_a_conflict_names_managers_and_fields() -> None:
    causes = [
        {
            "reason": "FieldManagerConflict",
            "message": 'conflict with "kubectl-edit" using apps/v1',
            "field": ".spec.replicas",
        },
        {
            "reason": "FieldManagerConflict",
            "message": 'conflict with "kubectl" with subresource "scale" using apps/v1',
            "field": '.spec.template.spec.containers[name="engine"].image',
        },
    ]
    body = {"reason": "Conflict", "message": "2 conflicts", "details": {"causes": causes}}
    response = failed_call(409, body)
    assert response.conflicts == (
        Conflict(manager="kubectl-edit", field=".spec.replicas"),
        Conflict(manager="kubectl", field='.spec.template.spec.containers[name="engine"].image'),
    )
    assert not response.stale
    assert not response.transient


@pytest.mark.parametrize(
    ("status", "body", "stale"),
    [
        (409, {"reason": "Conflict", "message": "uid mismatch"}, True),
        (409, {"reason": "AlreadyExists"}, False),
        (422, {"reason": "Invalid"}, False),
    ],
    ids=["another uid", "exists", "invalid"],
)
def test_a_conflict_without_managers_shows_a_stale_cache(
    status: int, body: dict[str, Any], stale: bool
) -> None:
    assert failed_call(status, body).stale is stale


@pytest.mark.parametrize(
    ("status", "transient"),
    [(UNREACHABLE, True), (401, True), (403, False), (404, False), (408, True), (409, False),
     (422, False), (429, True), (500, True), (503, True)],
)  # fmt: skip
def test_only_temporary_failures_are_transient(status: int, transient: bool) -> None:
    assert FailedCall(status=status, reason="", message="").transient is transient


def test_endless_brackets_are_a_failed_call() -> None:
    response = parse_response(502, b"[" * 100_000)
    assert isinstance(response, FailedCall)
    assert (response.status, response.reason) == (502, "Unknown")


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    status=st.integers(300, 599),
    body=st.binary(max_size=3000)
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=20),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["message", "reason", "details", "causes", "code"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode()),
)
def test_any_other_body_is_a_failed_call_with_a_bounded_message(status: int, body: bytes) -> None:
    response = parse_response(status, body)
    assert isinstance(response, FailedCall)
    assert response.status == status
    assert 0 < len(response.message) <= 1024
