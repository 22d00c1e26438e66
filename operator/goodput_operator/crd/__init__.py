"""The CustomResourceDefinitions, made from the dataclasses that validate a manifest locally.

Pure: dataclasses in, plain dictionaries out; no client of Kubernetes, no Kopf.
"""

from __future__ import annotations

from goodput_operator.crd.llmservice import render_crd

__all__ = ["render_crd"]
