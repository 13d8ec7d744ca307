"""Ids equal those of a reference written from scratch, whatever file the tokenizer came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetier.engine.chat_template import ChatTemplateError
from pagetier.engine.gguf_tokenizer import backend_from_gguf
from pagetier.engine.tokenizer import Tokenizer, load_tokenizer
from pagetier.engine.weights.export_hf import export_hf
from pagetier.kvstore.errors import ConfigError
from tests.engine.bpe_reference import PATTERNS, ByteLevelReference, SentencePieceReference
from tests.engine.checkpoints import (
    CORPUS,
    SPECIAL,
    byte_level_tokenizer,
    hf_model,
    tokenizer_fields,
    vocab_and_merges,
    write_gguf,
)
from tests.engine.tokenizers import (
    byte_level,
    metadata,
    sentencepiece,
    sentencepiece_metadata,
    sentencepiece_vocabulary,
)

TEXTS = (
    *CORPUS,
    "",
    " ",
    "  two  spaces   three",
    "\n\n\n",
    "tabs\t\tand\r\nlines \n x",
    "12345 3.14159 1,000,000 x2y3 ½ ²³ ٣٤ 10^6",
    "don't I'LL we'Re 'tis they'd",
    "e\u0301 é ﬁ Å \u212b",  # composed and not
    "👨‍👩‍👧 🏳️‍🌈 \U0001f468\u200d",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_end|><|endoftext|>",
    "a<|im_start|>b <|im_end|> c<|im_start",
    "\u0000\u0001\u007f\u0080\u009f\u00a0\u00ad\ufeff\ufffd",
    "日本語<|im_end|>한국어",
)
mixed = st.text(st.sampled_from("aAbt 'sld1290\n\t\r,.!?éñ日本👍\u200d½")) | st.text()


def reference(pre: str) -> ByteLevelReference:
    return ByteLevelReference(*vocab_and_merges(byte_level_tokenizer()), pre, SPECIAL)


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe"])
@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_ids_equal_the_reference(pre: str, text: str) -> None:
    assert byte_level(pre).encode(text) == reference(pre).encode(text)


@pytest.mark.parametrize("text", TEXTS)
def test_qwen2_ids_equal_the_reference_after_nfc(text: str) -> None:
    import unicodedata

    assert byte_level("qwen2").encode(text) == reference("qwen2").encode(unicodedata.normalize("NFC", text))


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe"])
def test_any_text_equals_the_reference_and_comes_back(pre: str) -> None:
    ours, theirs = byte_level(pre), reference(pre)

    @settings(max_examples=300, deadline=None)
    @given(mixed)
    def check(text: str) -> None:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids, skip_special_tokens=False) == text

    check()


def test_qwen2_equals_transformers_own_class() -> None:
    from transformers import Qwen2Tokenizer

    tokens, merges = vocab_and_merges(byte_level_tokenizer())
    pairs: Any = merges  # their annotation asks for strings, their code for pairs
    theirs = Qwen2Tokenizer(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs)
    ours = byte_level("qwen2")
    for text in TEXTS:
        if "<|im" not in text:  # their class is not told of these
            assert ours.encode(text) == theirs(text)["input_ids"], text


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 600)))
def test_decoding_any_ids_equals_the_library(ids: list[int]) -> None:
    """Broken UTF-8 and ids outside the vocabulary included."""
    tokenizer = BYTE_LEVEL
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == tokenizer.backend.decode(ids, skip_special_tokens=skip)


BYTE_LEVEL = byte_level()
SENTENCEPIECE = sentencepiece()
WORDS = [word for line in CORPUS for word in line.split()] + ["日", "x", " ", "ß1", "☃", "🦊"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(WORDS)))
def test_sentencepiece_ids_equal_the_reference_and_come_back(words: list[str]) -> None:
    text = " ".join(words)
    tokens, scores, _ = sentencepiece_vocabulary()
    ids = SENTENCEPIECE.encode(text)
    assert ids == [1, *SentencePieceReference(tokens, scores).encode(text)]
    assert SENTENCEPIECE.encode(text, add_special_tokens=False) == ids[1:]
    assert SENTENCEPIECE.decode(ids) == text
    assert SENTENCEPIECE.decode(ids) == SENTENCEPIECE.backend.decode(ids)


def test_sentencepiece_without_a_space_prefix() -> None:
    tokenizer = sentencepiece(tokenizer__ggml__add_space_prefix=False, tokenizer__ggml__add_bos_token=False)
    tokens, scores, _ = sentencepiece_vocabulary()
    for text in ("the dog", " the dog", "dog"):
        ids = tokenizer.encode(text)
        assert ids == SentencePieceReference(tokens, scores).encode(text, prefix="")
        assert tokenizer.decode(ids) == text


def test_special_tokens_are_single_ids_and_are_skipped_on_demand() -> None:
    assert BYTE_LEVEL.encode("<|im_start|>a<|im_end|>") == [1, BYTE_LEVEL.encode("a")[0], 2]
    assert BYTE_LEVEL.special_ids == {0, 1, 2}
    assert BYTE_LEVEL.decode([1, *BYTE_LEVEL.encode("a"), 2]) == "a"
    assert BYTE_LEVEL.decode([1, *BYTE_LEVEL.encode("a"), 2], skip_special_tokens=False) == "<|im_start|>a<|im_end|>"


def test_user_defined_tokens_are_single_ids_but_text() -> None:
    fields = metadata()
    tokens = [*fields["tokenizer.ggml.tokens"], "<tool>", "two words"]
    types = [*fields["tokenizer.ggml.token_type"], 4, 4]
    tokenizer = byte_level(tokenizer__ggml__tokens=tokens, tokenizer__ggml__token_type=types)
    ids = tokenizer.encode("<tool>two words")
    assert ids == [len(tokens) - 2, len(tokens) - 1]
    assert tokenizer.decode(ids) == "<tool>two words"
    assert not set(ids) & tokenizer.special_ids


@pytest.mark.parametrize(
    ("pre", "changes", "around"),
    [
        ("smollm", {}, ([], [])),
        ("smollm", {"tokenizer__ggml__add_bos_token": True}, ([1], [])),
        ("smollm", {"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__add_eos_token": True}, ([1], [2])),
        ("smollm", {"tokenizer__ggml__add_eos_token": True}, ([], [2])),
        ("smollm", {"tokenizer__ggml__add_bos_token": None}, ([], [])),
        ("llama-bpe", {"tokenizer__ggml__add_bos_token": None}, ([1], [])),
        ("llama-bpe", {}, ([], [])),
    ],
)
def test_bos_rules(pre: str, changes: dict[str, Any], around: tuple[list[int], list[int]]) -> None:
    ids = {"tokenizer__ggml__bos_token_id": 1, "tokenizer__ggml__eos_token_id": 2}
    tokenizer = byte_level(pre, **ids, **changes)
    plain = tokenizer.encode("a b", add_special_tokens=False)
    assert tokenizer.encode("a b") == around[0] + plain + around[1]
    assert plain == reference(pre).encode("a b")


def test_lone_surrogates_become_replacement_characters() -> None:
    assert BYTE_LEVEL.encode("a\ud800b") == BYTE_LEVEL.encode("a\ufffdb")
    assert BYTE_LEVEL.encode("\ud83d\ude00") == BYTE_LEVEL.encode("😀")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer__ggml__model": "bert"}, "tokenizer.ggml.model 'bert' is not supported; supported: gpt2, llama"),
        ({"tokenizer__ggml__model": None}, "tokenizer.ggml.model None is not supported"),
        ({"tokenizer__ggml__pre": "tekken"}, "tokenizer.ggml.pre 'tekken' is not supported; supported: gpt-2, llama"),
        ({"tokenizer__ggml__pre": None}, "tokenizer.ggml.pre None is not supported"),
        ({"tokenizer__ggml__tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer__ggml__merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer__ggml__merges": ["q zzz"]}, "tokenizer.ggml.merges holds 'q zzz', which makes no token"),
        ({"tokenizer__ggml__merges": ["q"]}, "tokenizer.ggml.merges holds 'q', which makes no token"),
        ({"tokenizer__ggml__token_type": [1, 2]}, "tokenizer.ggml.token_type has 2 entries for 448 tokens"),
        ({"tokenizer__ggml__tokens": ["a", "a"]}, "tokenizer.ggml.tokens names 1 tokens twice"),
    ],
)
def test_what_cannot_be_tokenised_rightly_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        backend_from_gguf(metadata(**changes), "m.gguf")
    assert str(caught.value).startswith("m.gguf: ")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer__ggml__scores": None}, "tokenizer.ggml.scores is missing"),
        ({"tokenizer__ggml__scores": [1.0]}, "tokenizer.ggml.scores is missing or does not match"),
        ({"tokenizer__ggml__unknown_token_id": 10**9}, "tokenizer.ggml.unknown_token_id is 1000000000"),
    ],
)
def test_an_unfit_sentencepiece_vocabulary_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        backend_from_gguf(sentencepiece_metadata(**changes), "m.gguf")


TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endfor %}"


@pytest.fixture
def gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGETIER_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "m.gguf"
    fields = tokenizer_fields(byte_level_tokenizer(), tokenizer__chat_template=TEMPLATE)
    write_gguf(path, hf_model("LlamaForCausalLM"), **fields)
    return path


def test_gguf_export_and_transformers_agree(gguf_file: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    export_hf(gguf_file, tmp_path / "hf")
    ours, exported = load_tokenizer(gguf_file), load_tokenizer(tmp_path / "hf")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    messages = [{"role": "user", "content": "Hi 12"}, {"role": "assistant", "content": "日本"}]
    for text in TEXTS:
        assert ours.encode(text) == exported.encode(text) == theirs(text)["input_ids"], text
        ids = ours.encode(text)
        assert ours.decode(ids) == exported.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    rendered = theirs.apply_chat_template(messages, tokenize=False)
    assert ours.apply_chat_template(messages) == exported.apply_chat_template(messages) == rendered
    for tokenizer in (ours, exported):
        assert tokenizer.eos_token_ids == (2,) and tokenizer.bos_token_id == 1
        assert tokenizer.special_ids == {0, 1, 2} and tokenizer.vocab_size == 448 and tokenizer.has_chat_template


@pytest.fixture
def folder(gguf_file: Path, tmp_path: Path) -> Path:
    export_hf(gguf_file, tmp_path / "hf")
    return tmp_path / "hf"


def edit(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**data, **changes}))


@pytest.mark.parametrize("flags", [{"add_bos_token": True}, {"add_bos_token": False}, {}])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_folders_bos_rule_is_that_of_transformers(flags: dict[str, bool], adds_bos: bool, folder: Path) -> None:
    from transformers import AutoTokenizer

    edit(folder / "tokenizer_config.json", **flags)
    bos = {"id": "<|im_start|>", "type_id": 0}
    if adds_bos:
        edit(
            folder / "tokenizer.json",
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": bos}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {bos["id"]: {"id": bos["id"], "ids": [1], "tokens": [bos["id"]]}},
            },
        )
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.encode("a b") == theirs("a b")["input_ids"]
    assert (ours.encode("a b")[0] == 1) == adds_bos


def test_end_tokens_come_from_generation_config_and_tokenizer(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[7, 0])
    assert Tokenizer.from_folder(folder).eos_token_ids == (7, 0, 2)
    (folder / "generation_config.json").unlink()
    edit(folder / "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    assert Tokenizer.from_folder(folder).eos_token_ids == (2, 0)  # of config.json, then the tokenizer's


def test_template_files_and_named_templates(folder: Path) -> None:
    config = folder / "tokenizer_config.json"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    edit(config, chat_template=named)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.apply_chat_template([]) == "plain"
    assert tokenizer.apply_chat_template([], tools=[{"name": "f"}]) == "tools"
    (folder / "chat_template.jinja").write_text("from a file")
    assert Tokenizer.from_folder(folder).apply_chat_template([]) == "from a file"


def test_a_model_without_a_template_says_so(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=None)
    tokenizer = Tokenizer.from_folder(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template; use the completions API"):
        tokenizer.apply_chat_template([])


def test_truncation_and_padding_of_the_file_do_not_apply(folder: Path) -> None:
    edit(
        folder / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
    )
    assert Tokenizer.from_folder(folder).encode(CORPUS[0]) == BYTE_LEVEL.encode(CORPUS[0])


def test_faults_of_the_file_are_named(folder: Path) -> None:
    path = folder / "tokenizer.json"
    edit(path, decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(ConfigError, match="the tokenizer's decoder 'WordPiece' is not supported"):
        Tokenizer.from_folder(folder)
    edit(path, decoder=None)
    with pytest.raises(ConfigError, match="the tokenizer has no decoder"):
        Tokenizer.from_folder(folder)
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a usable tokenizer: ") as caught:
        Tokenizer.from_folder(folder)
    assert "\n" not in str(caught.value)
    path.unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json: missing; folders with only a SentencePiece model"):
        Tokenizer.from_folder(folder)


def test_all_patterns_of_the_reference_are_covered() -> None:
    from pagetier.engine.gguf_tokenizer import PRE_TOKENIZERS

    assert set(PATTERNS) == set(PRE_TOKENIZERS)
