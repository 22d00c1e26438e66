"""Tokenizers of every kind of decoder, trained once, and the one of a real model."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING

import pytest
from tests.builders.tokenizers import KINDS
from tokenizers import Tokenizer, decoders
from tools.smollm2 import model_folder

if TYPE_CHECKING:
    from pathlib import Path


def _with_decoder(kind: str, decoder: decoders.Decoder) -> Tokenizer:
    tokenizer = KINDS[kind][0]()
    tokenizer.decoder = decoder
    return tokenizer


def _byte_fallback(*, strips: bool) -> Tokenizer:
    """Return a tokenizer as Llama 2's, or as Gemma's if it strips no space."""
    content = json.loads(KINDS["BPE without a pre-tokenizer"][0]().to_str())
    model = content["model"]
    model["byte_fallback"] = True
    for byte in range(256):
        model["vocab"][f"<0x{byte:02X}>"] = len(model["vocab"])
    tokenizer = Tokenizer.from_str(json.dumps(content))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strips:
        parts.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


TOKENIZERS = {
    "byte-level": KINDS["byte-level BPE"][0],
    "byte-level with a start token": KINDS["byte-level BPE with a prefix space and a start token"][
        0
    ],
    "word pieces": lambda: _with_decoder("WordPiece", decoders.WordPiece()),
    "metaspace": lambda: _with_decoder("Unigram", decoders.Metaspace()),
    "metaspace at the start only": lambda: _with_decoder(
        "Unigram", decoders.Metaspace(prepend_scheme="first")
    ),
    "byte fallback": lambda: _byte_fallback(strips=True),
    "byte fallback without a strip": lambda: _byte_fallback(strips=False),
    "no decoder": KINDS["Unigram"][0],
}


@cache
def trained(kind: str) -> Tokenizer:
    """Return the tokenizer of a kind."""
    return TOKENIZERS[kind]()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the folder of SmolLM2."""
    if not model_folder().exists():
        pytest.skip("NOT RUN: SmolLM2 is missing; run `make smollm2`")
    return model_folder()
