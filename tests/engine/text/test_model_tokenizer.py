"""The tokenizer of a model's folder: files, texts, chats, and their errors."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.engine.text.conftest import TOKENIZERS, trained

from goodput_core.errors import InputError
from goodput_engine.text.tokenizer import ModelTokenizer, load_model_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}\n{% endfor %}"
KINDS = sorted(TOKENIZERS)


def write(folder: Path, kind: str = "byte-level", **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    trained(kind).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def load(folder: Path) -> ModelTokenizer:
    tokenizer = load_model_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return load(write(tmp_path_factory.mktemp("model"), chat_template=TEMPLATE))


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert load_model_tokenizer(tmp_path) is None


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_a_tokenizer_in_another_format_is_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(
        InputError, match=rf"the tokenizer in {name} has no tokenizer\.json; create"
    ):
        load_model_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json: not a tokenizer\.json of"),
        ("tokenizer.json", "{}", r"tokenizer\.json: not a tokenizer\.json of"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json: must be a JSON object"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template must be a text"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": [], "template": "x"}]}',
            "or a list of objects with a name",
        ),
        ("tokenizer_config.json", '{"chat_template": "{{"}', "the chat template is invalid"),
        ("special_tokens_map.json", "nonsense", r"special_tokens_map\.json: is not JSON"),
        ("chat_template.jinja", "{% if %}", "the chat template is invalid"),
        ("chat_template.jinja", "x" * (1 << 20) + "x", "over 1048576 bytes"),
    ],
    ids=lambda value: value[:30],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    write(tmp_path)
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message) as error:
        load_model_tokenizer(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=examples(30))
@given(text=st.text(st.characters(codec="utf-8"), max_size=60), limit=st.none() | st.integers(0, 9))
def test_a_text_has_the_ids_of_the_tokenizer(
    kind: str, text: str, limit: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if kind not in _loaded:
        _loaded[kind] = load(write(tmp_path_factory.mktemp("kind"), kind))
    encoding = trained(kind).encode(text)
    padding = encoding.attention_mask.count(0)
    expected = encoding.ids[: len(encoding.ids) - padding]
    assert _loaded[kind].encode(text, limit=limit) == expected


_loaded: dict[str, ModelTokenizer] = {}


def test_the_start_token_belongs_to_a_text_and_not_to_a_chat(tmp_path: Path) -> None:
    folder = write(
        tmp_path, "byte-level with a start token", chat_template="{{ messages[0].content }}"
    )
    tokenizer = load(folder)
    assert tokenizer.encode("hello")[0] == 0
    assert tokenizer.encode_chat([("user", "hello")]) == tokenizer.encode("hello")[1:]


def test_a_chat_is_rendered_with_the_special_tokens_of_the_folder(tmp_path: Path) -> None:
    folder = write(tmp_path, bos_token={"content": "<|endoftext|>", "lstrip": False})
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    tokenizer = load(folder)
    ids = tokenizer.encode_chat([("user", "hello"), ("assistant", "hi")])
    assert ids == tokenizer.encode("<|endoftext|>user: hello\n<|endoftext|>assistant: hi\n")
    assert ids.count(0) == 2


def test_the_default_of_several_templates_applies(tmp_path: Path) -> None:
    templates = [{"name": "tools", "template": "t"}, {"name": "default", "template": "the"}]
    tokenizer = load(write(tmp_path, chat_template=templates))
    assert tokenizer.encode_chat([("user", "x")]) == tokenizer.encode("the")


def test_a_model_without_a_template_has_no_chats(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(InputError, match="has no chat template; send a prompt to /v1/completions"):
        tokenizer.encode_chat([("user", "hello")])


def test_the_date_of_a_template_is_injected(tmp_path: Path) -> None:
    write(tmp_path, chat_template="{{ strftime_now('%Y') }}")
    tokenizer = load_model_tokenizer(tmp_path, now=lambda: datetime(1999, 1, 1, tzinfo=UTC))
    assert tokenizer is not None
    assert tokenizer.encode_chat([("user", "x")]) == tokenizer.encode("1999")


@pytest.mark.parametrize("text", ["\ud800", "a" * 50 + "\udfff"])
def test_a_lone_surrogate_is_rejected(byte_level: ModelTokenizer, text: str) -> None:
    with pytest.raises(InputError, match="lone surrogate at character"):
        byte_level.encode(text)
    with pytest.raises(InputError, match="lone surrogate at character"):
        byte_level.encode_chat([("user", text)])


@pytest.mark.parametrize("part", ["a", " ", "\n", "1", "😀", "the replica ", "́"])
def test_a_megabyte_is_encoded_within_seconds(byte_level: ModelTokenizer, part: str) -> None:
    text = part * ((1 << 20) // len(part.encode()))
    start = time.process_time()
    ids = byte_level.encode(text)
    assert time.process_time() - start < 20
    detokenizer = byte_level.detokenizer()
    assert detokenizer.push(ids) + detokenizer.finish() == text


def test_an_overlong_text_is_encoded_in_part(byte_level: ModelTokenizer) -> None:
    ids = byte_level.encode("the replica " * 500_000, limit=100)
    assert 100 < len(ids) < 10_000


def test_a_long_text_within_the_limit_is_encoded_completely(byte_level: ModelTokenizer) -> None:
    text = " " * 40_000 + "the"
    assert byte_level.encode(text, limit=3_000) == byte_level.encode(text)


def test_a_token_has_its_bytes_or_a_name(byte_level: ModelTokenizer) -> None:
    (the,) = byte_level.encode(" the")
    assert byte_level.token_label(the, first=False) == b" the"
    assert byte_level.token_label(0, first=True) == "<|endoftext|>"
    assert byte_level.token_label(10**6, first=False) == "token_id:1000000"


def test_the_vocabulary_may_not_cover_a_text(tmp_path: Path) -> None:
    content = json.loads(trained("metaspace").to_str())
    content["model"]["unk_id"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InputError, match="rejects the text"):
        load(tmp_path).encode("日本")


@pytest.mark.torch
def test_a_real_chat_has_the_ids_of_its_model(smollm2: Path) -> None:
    tokenizer = load(smollm2)
    ids = tokenizer.encode_chat([("user", "What is the capital of France?")])
    assert ids[:4] == [1, 9690, 198, 2683]
    assert ids[-3:] == [520, 9531, 198]


@pytest.mark.torch
@pytest.mark.parametrize(
    "source",
    [
        TEMPLATE,
        (
            "{{ bos_token }}{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
            "{%- if add_generation_prompt %}>{% endif %}"
        ),
    ],
)
def test_a_chat_has_the_ids_of_transformers(tmp_path: Path, source: str) -> None:
    transformers = pytest.importorskip("transformers")
    chat = [("system", "Be brief."), ("user", "<é>\n{{ x }} 😀"), ("assistant", "")]
    for kind in ("byte-level with a start token", "byte fallback"):
        folder = write(
            tmp_path / kind,
            kind,
            chat_template=source,
            bos_token="<s>" if kind == "byte fallback" else "<|endoftext|>",
            tokenizer_class="PreTrainedTokenizerFast",
        )
        other = transformers.AutoTokenizer.from_pretrained(folder)
        messages = [{"role": role, "content": content} for role, content in chat]
        expected = other.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert load(folder).encode_chat(chat) == expected
        assert load(folder).encode("hello  world\n") == other("hello  world\n")["input_ids"]


@pytest.mark.torch
def test_a_real_chat_has_the_ids_of_transformers(smollm2: Path) -> None:
    transformers = pytest.importorskip("transformers")
    other = transformers.AutoTokenizer.from_pretrained(smollm2)
    chat = [("user", "naïve 😀"), ("assistant", "x"), ("user", "  why?\n")]
    messages = [{"role": role, "content": content} for role, content in chat]
    expected = other.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert load(smollm2).encode_chat(chat) == expected
