"""Convert the GGUF file of SmolLM2 into a folder in Hugging Face's format, in float32.

Runs in an environment with transformers, gguf and accelerate: `python convert_gguf.py FILE FOLDER`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(file: Path, folder: Path) -> None:
    """Write the model and its tokenizer."""
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are no longer quantized, and a quantized model could not be saved.
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # transformers does not know the split `smollm` of the file, in which each digit is a part.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
