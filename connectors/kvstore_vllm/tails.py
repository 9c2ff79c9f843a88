"""The ends of prefixes of which windows and states are saved, and their held pages.

vLLM frees a page of a window, or changes the state of a recurrent layer, while its request still runs. Only
what a later prompt can use of them is saved, so it is held from the step that computes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore_vllm.groups import Found, Group, in_parts, prompt_ends
from kvstore_vllm.options import DEFAULT, Options
from kvstore_vllm.references import PageReferences
from kvstore_vllm.worker import NULL_BLOCK

if TYPE_CHECKING:
    from vllm.v1.request import Request

_ANSWERS = 2
"""Tails of an answer that are held: the last one may lie behind the end of the answer."""


@dataclass(slots=True)
class Tail:
    """The held pages of a group before the position `end`, in tokens. `first`: the index of its first block.

    `of_answer`: it is saved only if the answer ends there.
    """

    group: Group
    end: int
    first: int
    blocks: list[Any]
    of_answer: bool = False


@dataclass(slots=True)
class Tracked:
    """A request with pages, since its last admission.

    `block_ids`: its pages at admission, by group. `hit_tokens`: tokens computed before its first step; None:
    no step yet. `stored`: leading blocks that are stored or being saved, by group. `found`: the indices of
    stored blocks by group, when it was admitted. `prompt_ends`: positions before which tails are saved.
    `ends`: those that are not computed yet, from the last to the first. `loading`: the pages of its load.
    `salt`: the suffix of its keys. `options`: what it says of the store. `saves`: its blocks are saved.
    """

    request: Request
    block_ids: Sequence[Sequence[int]]
    stored: list[int]
    found: list[set[int]]
    prompt_ends: frozenset[int]
    ends: list[int]
    loading: list[int]
    salt: bytes = b""
    options: Options = DEFAULT
    saves: bool = True
    hit_tokens: int | None = None
    tails: list[Tail] = field(default_factory=list)


class Tails:
    """Holds the pages of windows and states of tracked requests.

    Prefixes end at multiples of `alignment`, in tokens. A request that was preempted holds nothing, so that
    held pages do not make the engine preempt it again and again.
    """

    def __init__(self, groups: Sequence[Group], alignment: int, references: PageReferences) -> None:
        self._groups = list(groups)
        self._none = in_parts(groups)
        self._alignment = alignment
        self._references = references

    def ends(self, request: Request, found: Found) -> list[int]:
        """Returns the ends of prefixes that later prompts may share, from the last to the first.

        These are the ends of the prompt, and the position where an earlier prompt has parted from it.
        """
        if self._none or request.num_preemptions:
            return []
        ends = prompt_ends(request.num_prompt_tokens, self._alignment)
        ends.add(found.junction // self._alignment * self._alignment)
        return sorted(ends - {0}, reverse=True)

    def wanted(self, tracked: Tracked, end: int) -> bool:
        """Returns whether tails must be held before the step that computes the tokens up to `end`."""
        return bool(tracked.ends and tracked.ends[-1] <= end) or self._answer_end(tracked, end) > 0

    def hold(self, tracked: Tracked, end: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Holds the pages that a prefix needs before each end up to `end`."""
        while tracked.ends and tracked.ends[-1] <= end:
            self._hold(tracked, tracked.ends.pop(), block_ids, of_answer=False)
        if last := self._answer_end(tracked, end):
            self._hold(tracked, last, block_ids, of_answer=True)
            self._drop_old(tracked)

    def hold_state(self, tracked: Tracked, number: int, block_id: int, end: int) -> None:
        """Holds a state that vLLM has at `end`: the block table of states changes while a request runs."""
        group = self._groups[number]
        if end % self._alignment or tracked.request.num_preemptions or not tracked.saves:
            return
        index = group.first_needed(end)
        if block_id != NULL_BLOCK and index not in tracked.found[number]:
            held = self._references.hold([block_id])
            tracked.tails.append(Tail(group, end, index, held, end not in tracked.prompt_ends))
            self._drop_old(tracked)

    def complete(self, tracked: Tracked, confirmed: int) -> bool:
        """Returns whether the first `confirmed` tokens complete a tail."""
        return any(not tail.of_answer and tail.end <= confirmed for tail in tracked.tails)

    def take(self, tracked: Tracked, confirmed: int, ended: bool) -> list[Tail]:
        """Returns the tails to save among the first `confirmed` tokens. `ended`: the answer has ended.

        Their pages stay held until the saves of the next step have ended.
        """
        ready = [tail for tail in tracked.tails if tail.end <= confirmed and (ended or not tail.of_answer)]
        latest = max((tail.end for tail in ready if tail.of_answer), default=0)
        taken = [tail for tail in ready if not tail.of_answer or tail.end == latest]
        for tail in taken:
            tracked.tails.remove(tail)
            self._references.save(tail.blocks)
        return taken

    def needed(self, tracked: Tracked, group: Group, most: int) -> list[tuple[int, int]]:
        """Returns the ranges of a group's blocks that prefixes of a request's first `most` tokens need.

        These prefixes end where later prompts may part from the request, see `ends`, or at `most`.
        """
        size, prompt = self._alignment, tracked.request.num_prompt_tokens
        if group.full:
            return [(0, min(tracked.stored[group.number], most // group.block_tokens))]
        ends = {prompt // size * size, (prompt - 1) // size * size, most // size * size, *tracked.prompt_ends}
        found = [(group.first_needed(end), end // group.block_tokens) for end in ends if 0 < end <= most]
        return sorted({(first, stop) for first, stop in found if first < stop})

    def drop(self, tracked: Tracked, tails: Iterable[Tail] | None = None) -> None:
        """Gives back the pages of tails; by default of all."""
        for tail in list(tracked.tails if tails is None else tails):
            tracked.tails.remove(tail)
            self._references.drop(tail.blocks)

    def stop(self, tracked: Tracked) -> None:
        """Saves no more of a request's blocks."""
        self.drop(tracked)
        tracked.saves, tracked.ends, tracked.prompt_ends = False, [], frozenset()

    def _answer_end(self, tracked: Tracked, end: int) -> int:
        """Returns a new end of an answer's prefix by a step that ends at `end`; 0: there is none."""
        aligned = end // self._alignment * self._alignment
        request = tracked.request
        if self._none or request.num_preemptions or not tracked.saves or aligned <= request.num_prompt_tokens:
            return 0
        known = any(tail.of_answer and tail.end >= aligned for tail in tracked.tails)
        return 0 if known else aligned

    def _drop_old(self, tracked: Tracked) -> None:
        """Drops the tails of an answer but the last ones."""
        kept = sorted({tail.end for tail in tracked.tails if tail.of_answer})[-_ANSWERS:]
        self.drop(tracked, [tail for tail in tracked.tails if tail.of_answer and tail.end not in kept])

    def _hold(self, tracked: Tracked, end: int, block_ids: Sequence[Sequence[int]], of_answer: bool) -> None:
        for group in self._groups:
            wanted = group.needed(end)
            if group.full or group.state or not wanted:
                continue
            ids = list(block_ids[group.number][wanted.start : wanted.stop])
            # Without one of them the others are of no use.
            if tracked.found[group.number].issuperset(wanted) or len(ids) < len(wanted) or NULL_BLOCK in ids:
                continue
            tracked.tails.append(Tail(group, end, wanted.start, self._references.hold(ids), of_answer))
