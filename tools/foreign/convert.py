"""Convert the GGUF file of a model into a folder in the form of Hugging Face's cache.

Runs in the virtual environment of `transformers serve`: `python convert.py FILE FOLDER`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(file: Path, snapshot: Path) -> None:
    """Write the model in float32, and its tokenizer."""
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are no longer quantized, and a quantized model could not be saved.
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config
    model.save_pretrained(snapshot)
    AutoTokenizer.from_pretrained(**source).save_pretrained(snapshot)
    references = snapshot.parents[1] / "refs"
    references.mkdir(exist_ok=True)
    (references / "main").write_text(snapshot.name, encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
