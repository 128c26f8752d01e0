"""Small files of texts, and a tokenizer of a few words, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = (
    *("a", "the", "is", "was", "not", "good", "bad", "great", "poor", "film", "book", "plot", "we", "saw", "it", "and"),
    *(
        ",",
        ".",
        "?",
        "#",
        "##ing",
        "##s",
        "play",
        "act",
        "in",
        "john",
        "lives",
        "paris",
        "rome",
        "works",
        "for",
        "acme",
    ),
    *("every", "day", "how", "what", "where", "far", "who", "when", "red", "blue"),
)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCABULARY = {token: number for number, token in enumerate((*SPECIAL, *WORDS))}
PAD, UNK, CLS, SEP = (VOCABULARY[token] for token in SPECIAL[:4])


def ids(text: str) -> list[int]:
    """The numbers of tokens that are written with spaces between."""
    return [VOCABULARY[token] for token in text.split()]


def make_tokenizer(folder: Path) -> Path:
    """A WordPiece tokenizer as BERT's, of `VOCABULARY`, in a folder of Hugging Face's."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece(VOCABULARY, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", **names).save_pretrained(folder)
    return folder


def write_lines(file: Path, *rows: dict[str, Any]) -> Path:
    """A file of JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file
