"""The pod section: Kubernetes' own shapes, within bounds."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from goodput_core.errors import SpecError
from goodput_core.spec.choices import TolerationOperator
from goodput_core.spec.codec import copy_json, decode, encode
from goodput_core.spec.pod import PodSpec

POD = yaml.safe_load("""
nodeSelector: {nvidia.com/gpu.product: H200}
affinity:
  nodeAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 1
        preference: {matchExpressions: [{key: zone, operator: In, values: [a, b]}]}
tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: topology.kubernetes.io/zone
    whenUnsatisfiable: ScheduleAnyway
    labelSelector: {matchLabels: {app: chat}}
imagePullSecrets: [{name: registry}]
priorityClassName: serving
runtimeClassName: nvidia
schedulerName: volcano
resourceClaims: [{name: gpu, resourceClaimTemplateName: one-gpu}]
env:
  - {name: EMPTY, value: ""}
  - {name: TOKEN, valueFrom: {secretKeyRef: {name: hub, key: token, optional: true}}}
  - {name: LEVEL, valueFrom: {configMapKeyRef: {name: settings, key: level}}}
volumes:
  - {name: scratch, emptyDir: {}}
  - {name: weights, persistentVolumeClaim: {claimName: weights, readOnly: true}}
  - {name: settings, configMap: {name: settings, items: [{key: level, path: level}]}}
volumeMounts:
  - {name: scratch, mountPath: /scratch}
  - {name: weights, mountPath: /weights, subPath: hub, readOnly: true}
""")


def test_a_pod_section_is_encoded_unchanged() -> None:
    pod = decode(PodSpec, POD, "pod")
    assert pod.tolerations[0].operator is TolerationOperator.EXISTS
    assert encode(pod) == POD


def test_an_absent_pod_section_is_empty() -> None:
    assert encode(PodSpec()) == {}


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=8), v, max_size=4),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text(max_size=8), json_values, max_size=3))
def test_an_opaque_object_is_copied_unchanged(value: dict[str, Any]) -> None:
    pod = decode(PodSpec, {"affinity": value}, "pod")
    assert pod.affinity == value
    assert pod.affinity is not value
    assert encode(pod) == {"affinity": value}


def loop() -> dict[str, Any]:
    turning: dict[str, Any] = {}
    turning["again"] = turning
    return turning


def bomb() -> list[Any]:
    doubling: list[Any] = ["ha"]
    for _ in range(20):
        doubling = [doubling, doubling]
    return doubling


@pytest.mark.parametrize(
    ("value", "words"),
    [
        pytest.param(loop(), "too large", id="holds-itself"),
        pytest.param(bomb(), "too large", id="aliases"),
        pytest.param(["x"] * 1_000, "too large", id="many"),
        pytest.param("x" * 5_000, "5000 characters", id="long"),
        pytest.param({1: 2}, "not a short text", id="number-as-key"),
        pytest.param(float("nan"), "JSON cannot represent", id="nan"),
        pytest.param(1 << 64, "JSON cannot represent", id="giant"),
        pytest.param(b"x", "JSON cannot represent", id="bytes"),
    ],
)
def test_an_opaque_object_out_of_bounds_is_rejected(value: object, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        copy_json({"a": value}, "pod.affinity")
    assert caught.value.path == "pod.affinity"
