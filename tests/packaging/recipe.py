"""The recipe of the image, packaging/Containerfile."""

from __future__ import annotations

import re

from tests.packaging.sources import ROOT


class Recipe:
    """As much of a Containerfile as ours uses."""

    def __init__(self, text: str) -> None:
        joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
        self.steps = [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in joined.split("\n") if line]
        second = [i for i, (word, _) in enumerate(self.steps) if word == "FROM"][1]
        self.build, self.final = self.steps[:second], self.steps[second:]

    def of(self, steps: list[tuple[str, str]], word: str) -> list[str]:
        return [rest for name, rest in steps if name == word]


RECIPE = Recipe((ROOT / "packaging" / "Containerfile").read_text())
