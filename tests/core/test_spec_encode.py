"""Encoding a decoded spec returns the manifest without fields at their default."""

from __future__ import annotations

from typing import Any

import pytest

from goodput_core.spec.codec import decode, encode
from goodput_core.spec.llmservice import LLMServiceSpec

LEAST: dict[str, Any] = {
    "model": {"source": "emulated://unit"},
    "slo": {"classes": [{"name": "a", "ttftMs": 1, "tpotMs": 2}]},
}
FULL: dict[str, Any] = {
    "model": {"source": "hf://a/b", "revision": "c", "tokenSecret": {"name": "t"}},
    "engine": {
        "image": "i",
        "policy": "sarathi",
        "tokenBudget": {"max": 4096, "law": "ema"},
        "resources": {"limits": {"cpu": "500m"}},
        "pod": {"env": [{"name": "A", "value": ""}], "volumes": [{"name": "v", "emptyDir": {}}]},
    },
    "replicas": 0,
    "minReplicas": 0,
    "slo": {
        "classes": [{"name": "a", "ttftMs": 1, "tpotMs": 2, "objective": "99.95%"}],
        "default": "a",
    },
    "control": {"mode": "Manual"},
    "rollout": {"gate": {"trace": "pvc://a/b", "margin": "1%", "window": {
        "startSeconds": 1, "endSeconds": 2}}},
}  # fmt: skip


@pytest.mark.parametrize("written", [LEAST, FULL], ids=["least", "full"])
def test_a_decoded_manifest_is_encoded_unchanged(written: dict[str, Any]) -> None:
    assert encode(decode(LLMServiceSpec, written, "spec")) == written


def test_fields_at_their_default_are_left_out() -> None:
    spelt_out = {
        **LEAST,
        "engine": {"policy": "slo", "tokenBudget": {"min": 64}},
        "maxReplicas": 8,
    }
    assert encode(decode(LLMServiceSpec, spelt_out, "spec")) == LEAST
