"""Tokenizers trained here, of the kinds that served models have."""

import json
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers

from prompt_builder.probe import PROBE_TEXTS
from prompt_builder.tokenizer import EncodedCache, EstimateTokenizer, NoTokenizer, load_tokenizer

LLAMA_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The last is a single word to every pre-tokenizer here, and so the easiest to forge.
CONTROL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "ENDOFTEXT"]
CORPUS = [*PROBE_TEXTS, "system user assistant <|im_start|> </s> [INST] the ferry leaves the harbour at seven"] * 3

PRE_TOKENIZERS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "digits": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "digit runs": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "split": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}


def train(
    folder: Path,
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    alphabet: bool = True,
    normalizer: normalizers.Normalizer | None = None,
) -> Path:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    whole = pre_tokenizers.ByteLevel.alphabet() if alphabet else []
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=CONTROL, initial_alphabet=whole, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool_call>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def expected(folder: Path, text: str) -> list[int]:
    """The library's ids; only for texts without control tokens."""
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return list(library.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
def test_byte_level_tokenizers_are_fast_and_equal_to_the_library(kind: str, tmp_path: Path) -> None:
    folder = train(tmp_path, PRE_TOKENIZERS[kind])
    tokenizer = load_tokenizer(folder)
    assert tokenizer.name == "tiktoken"
    for text in PROBE_TEXTS:
        assert list(tokenizer.encode(text)) == expected(folder, text)


@pytest.mark.parametrize("text", ["½ ²", "a  1", "7   8    99 \n5", "x² 10½", " ٣٤٥  १२३", "  \n 5", "don't  1st"])
@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
def test_numbers_and_spaces_split_as_in_the_library(kind: str, text: str, tmp_path: Path) -> None:
    folder = train(tmp_path, PRE_TOKENIZERS[kind])
    assert list(load_tokenizer(folder).encode(text)) == expected(folder, text)


def test_a_normalizing_tokenizer_gives_composed_and_decomposed_text_the_same_ids(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(train(tmp_path, PRE_TOKENIZERS["split"], normalizer=normalizers.NFC()))
    assert tokenizer.name == "tiktoken"
    assert tokenizer.encode("bệnh") == tokenizer.encode(unicodedata.normalize("NFD", "bệnh"))


def test_bytes_that_the_vocabulary_lacks_are_left_out_as_in_the_library(tmp_path: Path) -> None:
    folder = train(tmp_path, PRE_TOKENIZERS["gpt2"], alphabet=False)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.name == "tiktoken"
    text = "ferry \U000f0000 harbour \x04\x05 seven"
    assert list(tokenizer.encode(text)) == expected(folder, text)


@pytest.mark.parametrize(
    "normalizer", [normalizers.Lowercase(), normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])]
)
def test_a_tokenizer_that_tiktoken_cannot_express_falls_back_to_the_library(
    normalizer: normalizers.Normalizer, tmp_path: Path
) -> None:
    folder = train(tmp_path, PRE_TOKENIZERS["gpt2"], normalizer=normalizer)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.name == "tokenizers"
    assert list(tokenizer.encode("The FERRY ½")) == expected(folder, "The FERRY ½")


def test_unequal_ranks_fall_back_to_the_library(tmp_path: Path) -> None:
    folder = train(tmp_path, PRE_TOKENIZERS["gpt2"])
    config = json.loads((folder / "tokenizer.json").read_text())
    config["model"]["merges"].reverse()
    (folder / "tokenizer.json").write_text(json.dumps(config))
    assert load_tokenizer(folder).name == "tokenizers"


@pytest.mark.parametrize("normalizer", [None, normalizers.NFKC()], ids=["tiktoken", "tokenizers"])
@pytest.mark.parametrize("control", [*CONTROL, "<tool_call>"])
def test_b7_a_control_token_in_content_is_ordinary_text(
    control: str, normalizer: normalizers.Normalizer | None, tmp_path: Path
) -> None:
    folder = train(tmp_path, PRE_TOKENIZERS["gpt2"], normalizer=normalizer)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.name == ("tiktoken" if normalizer is None else "tokenizers")
    control_id = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(control)
    for text in (control, f"a{control}system\nb", f" {control} ", control * 3):
        assert control_id not in tokenizer.encode(text)
        assert control_id in tokenizer.encode_scaffold(text)


def test_b7_a_unigram_vocabulary_that_spells_control_tokens_out_cannot_be_used_to_forge_them(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((char, -5.0) for char in "abcdefgs</>▁hi ")]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded.name == "tokenizers"
    assert 1 not in loaded.encode("hi</s>hi</s></s>")
    assert loaded.encode("hi</s>hi")[-2:] == loaded.encode("hi")
    assert loaded.encode_scaffold("hi</s>") == (*loaded.encode("hi"), 1)


def test_lone_surrogates_do_not_fail(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(train(tmp_path, PRE_TOKENIZERS["gpt2"]))
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a\ufffdb")
    assert EstimateTokenizer().count("a\ud800b") > 0


def test_fingerprints_differ_between_tokenizers(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = load_tokenizer(train(tmp_path / "a", PRE_TOKENIZERS["gpt2"]))
    second = load_tokenizer(train(tmp_path / "b", PRE_TOKENIZERS["split"]))
    assert first.fingerprint == load_tokenizer(tmp_path / "a").fingerprint != second.fingerprint


@pytest.mark.parametrize("content", [None, b"", b"{}", b"not json", b"[1]"])
def test_a_missing_or_broken_file_is_named(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(NoTokenizer, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_the_cache_of_ids_is_bounded_and_the_least_recently_used_leaves() -> None:
    cache = EncodedCache(5_000)
    encoded: list[str] = []

    def encode(text: str) -> tuple[int, ...]:
        encoded.append(text)
        return tuple(text.encode())

    for place in range(100):
        cache.get(f"text {place}", encode)
        cache.get("text 0", encode)
        assert cache.bytes_held <= 5_000
    assert encoded.count("text 0") == 1
    cache.get("text 1", encode)
    assert encoded.count("text 1") == 2


def test_a_text_too_large_for_the_cache_is_encoded_and_not_kept() -> None:
    cache = EncodedCache(5_000)
    assert len(cache.get("x" * 4_000, lambda text: tuple(text.encode()))) == 4_000
    assert cache.bytes_held == 0


def test_the_estimate_has_no_ids_and_counts_prose_of_any_script_from_above(tmp_path: Path) -> None:
    estimate = EstimateTokenizer()
    assert not estimate.exact
    assert estimate.encode("text") == estimate.encode_scaffold("text") == ()
    assert estimate.count("") == 0
    assert estimate.count("The ferry leaves the harbour at seven.") >= 9
    assert estimate.count("안녕하세요") == 15
