"""A tokenizer for the tiny models: one token for each byte of a text."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>"]
"""Tokens 0, 1 and 2: the model's first and last token are 1 and 2."""


def add_tokenizer(folder: Path, chat_template: str | None = None) -> Path:
    """Saves the tokenizer in the folder of a model with at least 259 tokens. Returns the folder."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(SPECIAL + letters)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **names)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return folder
