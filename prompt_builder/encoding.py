"""A fast tiktoken encoding from a model's `tokenizer.json`, where the two can be equal."""

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tiktoken

from prompt_builder.long_texts import LongTexts
from prompt_builder.probe import PROBE_TEXTS

Json = Mapping[str, Any]

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Digits cut the text before the GPT-2 pattern sees it: a number never takes the space before it, and a run of
# spaces before a number ends there, as it would at the end of the text.
DIGITS_THEN_GPT2 = (
    r"'(?:[sdmt]|ll|ve|re)|\p{{N}}{repeat}| ?\p{{L}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?=\p{{N}})|\s+(?!\S)|\s+"
)


class NotByteLevel(Exception):
    """The tokenizer is of a kind that tiktoken cannot express; the message says which part."""


@dataclass(frozen=True, slots=True)
class ByteEncoding:
    """`first_unknown`: ids from here on stand for bytes that the model's vocabulary does not hold.

    `normalize` is applied to the text first.
    """

    encoding: LongTexts
    first_unknown: int
    normalize: Callable[[str], str]


def byte_encoding(name: str, config: Json, control_ids: frozenset[int]) -> ByteEncoding:
    """The encoding of a `tokenizer.json` already parsed; raises NotByteLevel.

    Tokens in `control_ids` are left out of the ranks: tiktoken looks a whole piece of text up in them, so that
    a control token in there could be forged by its spelling.
    """
    model = config["model"]
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback") or model.get("dropout"):
        raise NotByteLevel(f"model type {model.get('type')} with fallback or dropout")
    if any(model.get(affix) for affix in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix")):
        raise NotByteLevel("the model has an unknown token or affixes")
    normalize = normalizer(config.get("normalizer"))
    pattern = split_pattern(config.get("pre_tokenizer"))
    byte_of = {char: byte for byte, char in byte_alphabet().items()}
    ranks: dict[bytes, int] = {}
    for token, token_id in model["vocab"].items():
        if token_id not in control_ids and all(char in byte_of for char in token):
            ranks[bytes(byte_of[char] for char in token)] = token_id
    first_unknown = max([*ranks.values(), *control_ids, *model["vocab"].values()], default=0) + 1
    for byte in range(256):
        ranks.setdefault(bytes([byte]), first_unknown + byte)
    # The last alternative never matches text that the pattern covers; without it tiktoken would lose the rest.
    encoding = tiktoken.Encoding(name, pat_str=pattern + r"|[\s\S]", mergeable_ranks=ranks, special_tokens={})
    return ByteEncoding(LongTexts(encoding, pattern, ranks, PROBE_TEXTS), first_unknown, normalize)


def normalizer(config: Json | None) -> Callable[[str], str]:
    """None and NFC, alone or in a sequence of one; raises NotByteLevel for others."""
    if config is None:
        return _unchanged
    if config["type"] == "Sequence" and len(config["normalizers"]) <= 1:
        return normalizer(next(iter(config["normalizers"]), None))
    if config["type"] == "NFC":
        return _nfc
    raise NotByteLevel(f"normalizer {config['type']}")


def split_pattern(config: Json | None) -> str:
    """One regular expression that splits as the pre-tokenizer does; raises NotByteLevel."""
    steps = _steps(config)
    kinds = [step["type"] for step in steps]
    if not steps or kinds[-1] != "ByteLevel" or steps[-1].get("add_prefix_space", True):
        raise NotByteLevel(f"pre-tokenizer {kinds}")
    uses_gpt2 = bool(steps[-1].get("use_regex", True))
    if kinds == ["ByteLevel"] and uses_gpt2:
        return GPT2_PATTERN
    if kinds == ["Digits", "ByteLevel"] and uses_gpt2:
        return DIGITS_THEN_GPT2.format(repeat="" if steps[0].get("individual_digits") else "+")
    if kinds == ["Split", "ByteLevel"] and not uses_gpt2:
        split = steps[0]
        regex = split["pattern"].get("Regex")
        if regex and split["behavior"] == "Isolated" and not split.get("invert"):
            return str(regex)
    raise NotByteLevel(f"pre-tokenizer {kinds}")


def byte_alphabet() -> dict[int, str]:
    """Byte-level BPE's printable stand-in for each byte: itself where it prints, else U+0100 and on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {byte: chr(byte) for byte in printable}
    rest = (byte for byte in range(256) if byte not in alphabet)
    return alphabet | {byte: chr(256 + place) for place, byte in enumerate(rest)}


def _steps(config: Json | None) -> Sequence[Json]:
    if config is None:
        return []
    if config["type"] == "Sequence":
        return list(config["pretokenizers"])
    return [config]


def _unchanged(text: str) -> str:
    return text


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)
