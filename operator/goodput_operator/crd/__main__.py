"""Prints the CustomResourceDefinition: `python -m goodput_operator.crd > FILE`."""

from __future__ import annotations

import sys

import yaml

from goodput_operator.crd.llmservice import render_crd

__all__: list[str] = []

if __name__ == "__main__":
    yaml.safe_dump(render_crd(), sys.stdout, sort_keys=False, width=100, allow_unicode=True)
