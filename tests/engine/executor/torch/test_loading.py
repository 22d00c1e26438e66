"""A folder that is not a complete, safe and supported model is refused with one sentence."""

from __future__ import annotations

import json
import logging
import os
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

import torch
from safetensors.torch import load_file, save_file
from tests.builders.torch_models import (
    ARCHITECTURES,
    CONTEXT,
    STOP_IDS,
    VOCABULARY,
    add_code,
    make_folder,
)
from transformers import dynamic_module_utils

from goodput_core.errors import InputError
from goodput_engine.executor.torch.attention import AttentionRule, RaggedBatch, SDPAttention
from goodput_engine.executor.torch.kv_pool import KVPool
from goodput_engine.executor.torch.loading import load_model
from goodput_engine.executor.torch.model import PackedRow

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.torch


def change_config(folder: Path, **changes: Any) -> None:
    """Change fields of `config.json`."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the weights of a model."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def pickle_weights(folder: Path) -> None:
    """Replace the weights by a pickled file."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


class Evil:
    """An object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self._path), "w"))


def pickle_code(folder: Path) -> None:
    """Replace the weights by a pickled file that executes code."""
    weights: dict[str, Any] = load_file(folder / "model.safetensors")
    weights["evil"] = Evil(folder / "executed")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def truncate_pickled(folder: Path) -> None:
    """Replace the weights by a pickled file without its end."""
    pickle_weights(folder)
    path = folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:-100])


def rename_pickled(folder: Path) -> None:
    """Replace the weights by a pickled file with a name that transformers does not know."""
    pickle_weights(folder)
    (folder / "pytorch_model.bin").rename(folder / "model.pth")


def pickle_index(folder: Path, *, shard: str = "pytorch_model-00001-of-00001.bin") -> None:
    """Replace the weights by an index of one pickled shard."""
    pickle_weights(folder)
    weights = load_keys(folder / "pytorch_model.bin")
    (folder / "pytorch_model.bin").rename(folder / "pytorch_model-00001-of-00001.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, shard)}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def load_keys(path: Path) -> list[str]:
    """Return the names of pickled weights."""
    return list(torch.load(path, weights_only=True))


def truncate(folder: Path) -> None:
    """Cut off the second half of the weights."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def write_index(folder: Path, **shards: str) -> None:
    """Replace the weights by an index of shards."""
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def cut_shard(folder: Path) -> None:
    """Divide the weights into two shards, the second of which is incomplete."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    write_index(folder, **{name: shard for shard, part in shards.items() for name in part})
    for shard, part in shards.items():
        save_file({name: weights[name] for name in part}, folder / shard, metadata={"format": "pt"})
    path = folder / "b.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def quantize(folder: Path) -> None:
    """Store the weights as integers, as quantized models do."""
    path = folder / "model.safetensors"
    weights = {name: one.to(torch.int8) for name, one in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})


def make_pipe(folder: Path) -> None:
    """Replace the configuration by a named pipe, which nothing writes to."""
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def change_ends(folder: Path, value: object) -> None:
    """Set the ids of the tokens that end an output."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))


def run_code(folder: Path) -> None:
    """Add code to the folder that creates a file when it is imported."""
    code = f"open({str(folder / 'executed')!r}, 'w').close()\n"
    (folder / "configuration_mine.py").write_text(code)
    change_config(folder, model_type="mine", auto_map={"AutoConfig": "configuration_mine.Mine"})


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json cannot be read"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "must be a JSON object"),
    "config is deep": (lambda f: (f / "config.json").write_text("[" * 200_000), "is not JSON"),
    "unknown architecture": (
        lambda f: change_config(f, model_type="mine"),
        "model_type 'mine', which transformers does not know",
    ),
    "no architecture": (lambda f: change_config(f, model_type=None), "model_type 'None'"),
    "an architecture that is a list": (
        lambda f: change_config(f, model_type=["llama"]),
        "model_type \"['llama']\", which transformers does not know",
    ),
    "an encoder": (lambda f: change_config(f, model_type="clip"), "not a causal language model"),
    "code": (run_code, "needs code from the model's folder, which is not executed"),
    "quantized": (
        lambda f: change_config(f, quantization_config={"quant_method": "gptq"}),
        "quantized weights are not implemented yet",
    ),
    "integers": (quantize, "has the data type I8, and quantized weights are not implemented yet"),
    "impossible config": (
        lambda f: change_config(f, hidden_size=-1),
        "config.json: hidden_size is -1, but must be at least 1; download the model again",
    ),
    "no heads": (
        lambda f: change_config(f, num_attention_heads=0),
        "config.json: num_attention_heads is 0, but must be at least 1",
    ),
    "no layers": (
        lambda f: change_config(f, num_hidden_layers=0),
        "config.json has 0 layers, but the weights have 21 tensors; download the model again",
    ),
    "a context of 10**30 tokens": (
        lambda f: change_config(f, max_position_embeddings=10**30),
        "its max_position_embeddings is 1e+30, but",
    ),
    "layers that take an hour to create": (
        lambda f: change_config(f, num_hidden_layers=10**8),
        "config.json has 100000000 layers, but the weights have 21 tensors",
    ),
    "an unknown rope": (
        lambda f: change_config(f, rope_parameters={"rope_type": "bogus", "rope_theta": 1e4}),
        "config.json: rope_parameters.rope_type is 'bogus', which transformers does not know",
    ),
    "an unknown activation": (
        lambda f: change_config(f, hidden_act="bogus"),
        "config.json: hidden_act is 'bogus', which transformers does not know",
    ),
    "an unknown data type": (
        lambda f: change_config(f, dtype="float8"),
        "config.json: dtype is 'float8', which is not a data type of torch",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "download the model"),
    "pickled": (pickle_weights, "pytorch_model.bin are pickled"),
    "half a file": (truncate, "damaged or incomplete"),
    "other shapes": (
        lambda f: change_config(f, intermediate_size=50),
        "model.layers.0.mlp.down_proj.weight has the shape [32, 48] in the weights and [32, 50]",
    ),
    "a missing layer": (
        lambda f: change_weights(f, lambda w: w.pop("model.layers.1.mlp.up_proj.weight").size()),
        "do not have model.layers.1.mlp.up_proj.weight",
    ),
    "a missing shard": (
        lambda f: write_index(f, a="model-00001-of-00002.safetensors"),
        "model-00001-of-00002.safetensors is missing",
    ),
    "half a shard": (cut_shard, "download the model again: b.safetensors has "),
    "a shard elsewhere": (lambda f: write_index(f, a="../../etc/passwd"), "outside the folder"),
    "an empty index": (write_index, "has no weight_map"),
    "config is a pipe": (make_pipe, "config.json: is not a regular file"),
    "a weight that is no number": (
        lambda f: change_weights(f, lambda w: w["lm_head.weight"].fill_(torch.nan)),
        "its logits are not finite numbers; download the weights again",
    ),
    "an end that is a text": (
        lambda f: change_ends(f, "2"),
        "its eos_token_id is 2, but must be a token id or a list of them",
    ),
    "an end that is a list": (lambda f: change_ends(f, [[2]]), "its eos_token_id is [[2]], but"),
    "an end that is null": (lambda f: change_ends(f, [2, None]), "its eos_token_id is [2, None]"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused_with_one_sentence(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    make_folder(tmp_path, "Llama")
    load_model(tmp_path)
    breaking, message = BROKEN[name]
    breaking(tmp_path)
    capfd.readouterr()
    with pytest.raises(InputError) as caught:
        load_model(tmp_path)
    text = str(caught.value)
    assert text.startswith(str(tmp_path))
    assert message in text
    assert capfd.readouterr() == ("", "")  # without the report of transformers
    assert "\n" not in text
    assert not (tmp_path / "executed").exists()


def test_the_report_on_weights_that_are_not_used_is_still_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path, "Llama")
    change_weights(tmp_path, lambda weights: weights.update(surplus=torch.ones(1)))
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [handler])
    load_model(tmp_path)
    assert any("surplus" in record.getMessage() for record in records)


def test_code_beside_a_known_architecture_is_not_executed(tmp_path: Path) -> None:
    make_folder(tmp_path, "Llama")
    run_code(tmp_path)
    change_config(tmp_path, model_type="llama")
    assert load_model(tmp_path).vocab_size == VOCABULARY
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("pickling", [pickle_weights, pickle_index])
def test_pickled_weights_are_loaded_if_they_are_allowed(
    tmp_path: Path, pickling: Callable[[Path], None]
) -> None:
    make_folder(tmp_path, "Llama")
    safe = load_model(tmp_path, dtype="float64")
    pickling(tmp_path)
    pickled = load_model(tmp_path, dtype="float64", allow_pickle_weights=True)
    ids = list(range(1, 20))
    assert torch.equal(safe.reference_logits(ids), pickled.reference_logits(ids))


UNTRUSTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "code": (pickle_code, "has more than tensors, or is damaged, and is not loaded"),
    "half a file": (truncate_pickled, "damaged"),
    "another name": (rename_pickled, "only pytorch_model.bin or the shards of"),
    "a list": (lambda f: torch.save([1, 2], f / "pytorch_model.bin"), "no weights by their names"),
    "a shard elsewhere": (lambda f: pickle_index(f, shard="../x.bin"), "outside the folder"),
    "a shard of another kind": (
        lambda f: pickle_index(f, shard="config.json"),
        "names 'config.json', which is no .bin file",
    ),
}


@pytest.mark.parametrize("name", UNTRUSTED)
def test_allowed_pickles_execute_no_code_and_may_be_broken(tmp_path: Path, name: str) -> None:
    make_folder(tmp_path, "Llama")
    breaking, message = UNTRUSTED[name]
    breaking(tmp_path)
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    with pytest.raises(InputError) as caught:
        load_model(tmp_path, allow_pickle_weights=True)
    text = str(caught.value)
    assert text.startswith(str(tmp_path))
    assert message in text
    assert "\n" not in text
    assert not (tmp_path / "executed").exists()


MODELING = """\
from transformers import LlamaConfig, LlamaForCausalLM

class MineConfig(LlamaConfig):
    model_type = "mine"

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""


def test_the_code_of_a_folder_is_executed_only_if_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "mine", "Llama")
    expected = load_model(folder, dtype="float64").reference_logits([3, 4, 5])
    (folder / "modeling_mine.py").write_text(
        f"open({str(tmp_path / 'executed')!r}, 'w').close()\n{MODELING}"
    )
    change_config(
        folder,
        model_type="mine",
        architectures=["MineForCausalLM"],
        auto_map={
            "AutoConfig": "modeling_mine.MineConfig",
            "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
        },
    )
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(InputError, match=r"which is not executed; .* or trust this code and add"):
        load_model(folder, allow_pickle_weights=True)
    assert not (tmp_path / "executed").exists()
    model = load_model(folder, dtype="float64", allow_remote_code=True)
    assert (tmp_path / "executed").exists()
    assert type(model.model).__name__ == "MineForCausalLM"
    assert torch.equal(model.reference_logits([3, 4, 5]), expected)


def test_broken_code_of_a_folder_is_reported_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "mine", "Llama")
    (folder / "modeling_mine.py").write_text("raise ValueError('a\\nb')\n")
    change_config(folder, model_type="mine", auto_map={"AutoConfig": "modeling_mine.MineConfig"})
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(InputError, match=r"transformers cannot load the model: a b$"):
        load_model(folder, allow_remote_code=True)


def test_an_error_of_the_models_code_for_its_first_token_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "own", "Llama")
    add_code(folder, "raise RuntimeError('shapes\\ndiffer')")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(InputError) as caught:
        load_model(folder, allow_remote_code=True)
    assert str(caught.value) == (
        f"{folder}: this own model cannot be served: its code raises RuntimeError for the first "
        "token (shapes differ); correct config.json, or serve another model"
    )


def test_an_end_outside_the_vocabulary_ends_no_output(tmp_path: Path) -> None:
    make_folder(tmp_path, "Llama")
    change_ends(tmp_path, [3, -1, VOCABULARY, VOCABULARY - 1, 10**9])
    assert load_model(tmp_path).stop_ids == {3, VOCABULARY - 1}


@pytest.mark.parametrize(
    "generation", [{"temperature": 0.7}, {"eos_token_id": None}], ids=["no end", "a null"]
)
def test_a_generation_config_without_an_end_leaves_those_of_the_configuration(
    tmp_path: Path, generation: dict[str, Any]
) -> None:
    make_folder(tmp_path, "Llama")
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_model(tmp_path).stop_ids == frozenset(STOP_IDS)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json cannot be read \(No such file"):
        load_model(tmp_path / "none")


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "attention sinks": ("GptOss", {"sliding_window": 7}, "unknown argument 's_aux'"),
    "state space": ("Mamba", {}, "no exchangeable attention"),
    "alibi": ("Bloom", {"n_head": 4}, "no exchangeable attention"),
    "layers without attention": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention"]},
        "its layer 0 computes no attention",
    ),
    "heads of two sizes": ("DeepseekV3", {}, "heads have different sizes"),
}


@pytest.mark.filterwarnings("ignore")  # transformers on its own configurations
@pytest.mark.parametrize("name", REFUSED)
def test_an_attention_that_is_not_ours_is_refused(tmp_path: Path, name: str) -> None:
    architecture, changes, message = REFUSED[name]
    make_folder(tmp_path, architecture, **changes)
    with pytest.raises(InputError, match="cannot be served: ") as caught:
        load_model(tmp_path)
    assert message in str(caught.value)


LONGROPE = {
    "max_position_embeddings": 256,
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 4.0, 8.0],
    },
}


class WrongAttention(SDPAttention):
    """Attention that is wrong for some sequences.

    Args:
        wrong: True for a number of queries and of keys for which the output is wrong.
    """

    def __init__(self, wrong: Callable[[int, int], bool]) -> None:
        super().__init__()
        self._wrong = wrong

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: RaggedBatch,
        rule: AttentionRule,
    ) -> torch.Tensor:
        out = super().attend(q, keys, values, batch, rule)
        ends = batch.cu_seqlens_q.tolist()
        for (start, end), num_keys in zip(pairwise(ends), batch.seqused_k.tolist(), strict=True):
            if self._wrong(end - start, num_keys):
                out[start:end] *= 1.5
        return out


@pytest.mark.parametrize(
    "wrong",
    [
        lambda queries, keys: True,
        lambda queries, keys: 1 < queries < keys,
        lambda queries, keys: queries == 1 < keys,
    ],
    ids=["always", "in later chunks", "in decodes"],
)
def test_an_attention_with_other_logits_than_the_models_own_is_refused(
    wrong: Callable[[int, int], bool], tmp_path: Path
) -> None:
    make_folder(tmp_path, "Llama")
    with pytest.raises(InputError, match="paged attention does not give the logits of its own"):
        load_model(tmp_path, adapter=WrongAttention(wrong))
    load_model(tmp_path, adapter=WrongAttention(lambda queries, keys: False))


# With small weights, the logits hardly depend on the positions.
@pytest.mark.parametrize("initializer_range", [0.3, 0.02])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_rotary_embedding_that_follows_other_requests_is_refused(
    tmp_path: Path, dtype: str, initializer_range: float
) -> None:
    make_folder(tmp_path, "Phi3", **LONGROPE, initializer_range=initializer_range)
    with pytest.raises(InputError, match="limit the context to the original_max_position"):
        load_model(tmp_path, dtype=dtype)
    with pytest.raises(InputError, match="request of 65 tokens changes the outputs of others"):
        load_model(tmp_path, dtype=dtype, max_model_tokens=65)
    assert load_model(tmp_path, dtype=dtype, max_model_tokens=64).max_model_tokens == 64


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_sound_model_of_each_architecture_is_accepted_in_each_data_type(
    tmp_path: Path, architecture: str
) -> None:
    for initializer_range in (0.02, 0.1):
        folder = make_folder(
            tmp_path / f"{initializer_range}", architecture, initializer_range=initializer_range
        )
        for dtype in ("float32", "bfloat16"):
            load_model(folder, dtype=dtype)


def test_a_dynamic_rotary_embedding_follows_no_other_request_within_the_context(
    tmp_path: Path,
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    make_folder(tmp_path, "Llama", rope_parameters=rope)
    model = load_model(tmp_path, dtype="float64")
    assert model.max_model_tokens == CONTEXT

    def logits_beside(*positions: int) -> torch.Tensor:
        pool = KVPool(model.geometry, num_blocks=8, block_size=4)
        rows = [PackedRow([7, 3, 9, 2, 8], 0, [0, 1], samples=True)]
        for at, position in enumerate(positions):
            rows.append(PackedRow([5], 0, [2 + at], samples=False, shift=position))
        return model.compute(rows, pool)

    alone = logits_beside()
    torch.testing.assert_close(logits_beside(CONTEXT - 1, 40), alone, rtol=0, atol=1e-12)
    # Beyond the context, which no request reaches, a neighbour would change the others.
    assert (logits_beside(4 * CONTEXT) - alone).abs().max() > 1e-3
    with pytest.raises(InputError, match=f"must be 1 to {CONTEXT}, not {2 * CONTEXT}"):
        load_model(tmp_path, max_model_tokens=2 * CONTEXT)


@pytest.mark.parametrize("limit", [0, CONTEXT + 1])
def test_a_context_beyond_the_model_is_refused(tmp_path: Path, limit: int) -> None:
    make_folder(tmp_path, "Llama")
    with pytest.raises(InputError, match=f"must be 1 to {CONTEXT}, not {limit}"):
        load_model(tmp_path, max_model_tokens=limit)


def test_an_unknown_data_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'int4' is not one of float32, float64"):
        load_model(tmp_path, dtype="int4")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_model_is_loaded_in_the_given_data_type(tmp_path: Path, dtype: str) -> None:
    make_folder(tmp_path, "Llama")
    model = load_model(tmp_path, dtype=dtype)
    assert model.geometry.dtype is getattr(torch, dtype)
    assert (model.vocab_size, model.stop_ids) == (VOCABULARY, frozenset(STOP_IDS))
