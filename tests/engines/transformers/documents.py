"""Prompts about documents: pages of this project's documentation, and a question about one of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[3] / "docs"
SYSTEM = (
    "<|im_start|>system\nYou answer questions about a storage daemon from its documentation. Pages of the "
    "documentation come first, then a question about one of them. Keep to what the pages say, be short, and "
    "say so if they do not tell.<|im_end|>\n<|im_start|>user\n"
)
ASKED = (
    '\nQuestion: What does the page "{title}" say? Answer in one sentence.<|im_end|>\n<|im_start|>assistant\n'
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a system prompt, of documents, and of a question about one of them."""

    prefix: list[int]
    chunks: list[list[int]]
    question: list[int]

    @property
    def tokens(self) -> list[int]:
        """Returns the whole prompt."""
        return [*self.prefix, *(token for chunk in self.chunks for token in chunk), *self.question]


def prompts(tokenizer: Any, count: int, chunks: int, chunk_tokens: int) -> list[Prompt]:
    """Returns prompts of the first tokens of pages that are long enough, in orders of their own."""
    pages = []
    for file in sorted(DOCS.glob("*.md")):
        text = file.read_text(encoding="utf-8")
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) >= chunk_tokens:
            pages.append((text.partition("\n")[0].removeprefix("# "), ids[:chunk_tokens]))
    made, prefix = [], tokenizer(SYSTEM, add_special_tokens=False)["input_ids"]
    for n in range(count):
        chosen = random.Random(n).sample(pages, chunks)
        asked = ASKED.format(title=chosen[n % chunks][0])
        question = tokenizer(asked, add_special_tokens=False)["input_ids"]
        made.append(Prompt(prefix, [ids for _, ids in chosen], question))
    return made


def random_prompts(vocabulary: int, count: int, chunks: int, chunk_tokens: int) -> list[Prompt]:
    """Returns prompts of random tokens, from twice as many documents as a prompt has."""
    dice = random.Random(0)

    def text(tokens: int) -> list[int]:
        return [dice.randrange(1, vocabulary) for _ in range(tokens)]

    prefix, documents = text(32), [text(chunk_tokens) for _ in range(2 * chunks)]
    return [Prompt(prefix, dice.sample(documents, chunks), text(16)) for _ in range(count)]
