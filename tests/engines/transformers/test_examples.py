"""The example of a chat: a second process finds the first one's prefix."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from tests.engines.tokenizer import add_tokenizer
from tests.engines.transformers.models import llama

EXAMPLE = Path(__file__).parents[3] / "examples/transformers_chat.py"
BLOCK_TOKENS = 32
"""As in the example."""
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def test_transformers_chat_goes_on_in_a_second_process(tmp_path: Path) -> None:
    llama(bos_token_id=1, eos_token_id=2, max_position_embeddings=2048).save_pretrained(tmp_path)
    add_tokenizer(tmp_path, TEMPLATE)
    ran = subprocess.run(
        [sys.executable, str(EXAMPLE), str(tmp_path)],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    lines = ran.stdout.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == ["first process:", "second process:"]
    turns = [tuple(map(int, re.findall(r"\d+", line))) for line in lines if line.startswith(" ")]
    assert len(turns) == 4
    assert turns[0][1] == 0
    for (before, _), (_, restored) in pairwise(turns):
        # The answer's text may encode to other tokens than the model's; the prompt before it does not.
        assert restored >= before // BLOCK_TOKENS * BLOCK_TOKENS
