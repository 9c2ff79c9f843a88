"""Checks arguments before any message is sent: urls, deadlines, names, blocks and buffers."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from kvstore.client.estimates import Estimate
from kvstore.client.parts import Buffer, Parts, as_bytes, gpu_of
from kvstore.cuda.array_interop import is_on_device
from kvstore.cuda.device import Gpu, why_not
from kvstore.errors import MisuseError
from kvstore.types import Key, Layout, as_tokens, check_keys, check_tenant
from kvstore.wire.messages import NORMAL

_MOST_TOKEN_CHARS = 4096


def socket_path(url: str | None) -> str:
    """Returns the path in `unix:///path`; url None: in KVSTORE_SOCKET. Empty if neither names one.

    Raises MisuseError for other urls.
    """
    url = url or os.environ.get("KVSTORE_SOCKET")
    if not url:
        return ""
    path = url.removeprefix("unix://")
    if not path.startswith("/"):
        raise MisuseError(f"cannot connect to {url!r}", "unix:///absolute/path/of/kvstore.sock")
    if "unix://" in path:
        raise MisuseError(f"several daemons: {url!r}", "name one, or a list with commas where several may be")
    if len(os.fsencode(path)) > 107:
        raise MisuseError(f"socket path of {len(os.fsencode(path))} bytes: {path}", "at most 107 bytes")
    return path


def split_urls(urls: str) -> list[str]:
    """Returns the URLs of daemons in a list separated by commas; an empty one, the default, if it is empty.

    Raises MisuseError for an invalid URL, and for one that is there twice.
    """
    if not urls:
        return [""]
    found = [url.strip() for url in urls.split(",")]
    for url in found:
        if not url:
            raise MisuseError(f"an empty URL in {urls!r}", "unix:///absolute/path/of/kvstore.sock,...")
        socket_path(url)
    if len(set(map(socket_path, found))) < len(found):
        raise MisuseError(f"a daemon is named twice in {urls!r}", "name each daemon once")
    return found


def check_parent(parent: Key | None, layout: Layout) -> None:
    """Raises MisuseError unless `parent` is a key or None. Independent blocks have none."""
    if parent is None:
        return
    if layout.independent:
        raise MisuseError("blocks of an independent namespace have no parent", "leave out `parent`")
    check_keys([parent])


def check_chain(chain: tuple[Layout, Key] | None, layout: Layout) -> None:
    """Raises MisuseError unless blocks of this layout may belong to this block of a chain."""
    if chain is None:
        return
    if not layout.independent:
        raise MisuseError("only independent blocks belong to a chain", "pass `parent` instead of `chain`")
    if chain[0].independent:
        raise MisuseError("independent blocks are no chain", "a namespace of the kind chain")
    check_keys([chain[1]])


def check_deadline(deadline_s: float) -> float:
    """Returns the deadline. Raises MisuseError unless it is a positive number of seconds."""
    if not 0 < deadline_s < 86400:
        raise MisuseError(f"deadline_s is {deadline_s!r}", "seconds, more than 0 and less than a day")
    return deadline_s


def with_wait(deadline_s: float, wait_s: float) -> float:
    """Returns `deadline_s` plus `wait_s`, less than a day. Raises MisuseError unless 0 <= wait_s < a day."""
    if not 0 <= wait_s < 86400:
        raise MisuseError(f"wait_s is {wait_s!r}", "seconds, 0 or more and less than a day")
    return min(check_deadline(deadline_s) + wait_s, 86399.0)


def check_pin_ttl(ttl_s: float) -> float:
    """Returns the TTL of a pin. Raises MisuseError unless it is more than 0 s and at most 30 days."""
    if not 0 < ttl_s <= 30 * 86400:
        raise MisuseError(f"ttl_s is {ttl_s!r}", "seconds, more than 0 and at most 30 days")
    return float(ttl_s)


def check_namespace_ttl(ttl_s: float) -> float:
    """Returns the TTL of a namespace's blocks. Raises MisuseError if it is negative. 0: as configured."""
    if not 0 <= ttl_s < math.inf:
        raise MisuseError(f"ttl_s is {ttl_s!r}", "seconds, or 0 for the configured TTL")
    return float(ttl_s)


def check_owner(owner: str) -> str:
    """Returns the owner. Raises MisuseError unless it is a tenant's name, or "" for the own tenant."""
    return check_tenant(owner) if owner != "" else ""


def check_token(token: str) -> str:
    """Returns the token. Raises MisuseError without the token unless it is short plain text."""
    if not isinstance(token, str) or not token.isascii() or len(token) > _MOST_TOKEN_CHARS:
        raise MisuseError("this can't be a token", "`kvstore tenant token NAME` prints one: kvs_...")
    return token


def check_readers(tenants: Sequence[str]) -> list[str]:
    """Returns the tenants. Raises MisuseError for invalid names, and for a name instead of a list."""
    if isinstance(tenants, str):
        raise MisuseError(f"tenants is {tenants!r:.80}", f"a list of names: [{tenants!r:.80}]")
    return [check_tenant(name) for name in tenants]


def check_names(model: str, revision: str) -> None:
    """Raises MisuseError unless both are text."""
    if not isinstance(model, str) or not isinstance(revision, str):
        raise MisuseError(f"model is {model!r:.80}, revision {revision!r:.80}", 'text, "" for any')


def check_hint(next_use_s: float | None, closed: bool, priority: int) -> tuple[bool, float, bool, int]:
    """Returns the fields of a hint message. Raises MisuseError for an invalid time, flag or priority."""
    if next_use_s is not None and not (_is_number(next_use_s) and 0 <= next_use_s < math.inf):
        raise MisuseError(f"next_use_s is {next_use_s!r:.80}", "seconds from now, or None if unknown")
    if not isinstance(closed, bool):
        raise MisuseError(f"closed is {closed!r:.80}", "True or False")
    if not _is_number(priority) or priority not in (-1, 0, 1):
        raise MisuseError(f"priority is {priority!r:.80}", "-1, 0 or 1")
    return next_use_s is not None, float(next_use_s or 0), closed, int(priority) + NORMAL


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_speed(recompute_tokens_per_s: float | None) -> float:
    """Returns the speed, 0 for None. Raises MisuseError unless it is a positive number of tokens/s."""
    if recompute_tokens_per_s is None:
        return 0.0
    if not 0 < recompute_tokens_per_s < math.inf:
        raise MisuseError(
            f"recompute_tokens_per_s is {recompute_tokens_per_s!r}", "tokens/s, more than 0, or None"
        )
    return float(recompute_tokens_per_s)


def check_estimate(estimate: Estimate) -> Estimate:
    """Returns what a lookup says of its caller. Raises MisuseError for times or a number out of range."""
    have = estimate.have
    for name, value in (("recompute_s", estimate.recompute_s), ("load_s", estimate.load_s)):
        if not (_is_number(value) and 0 < value < math.inf):
            raise MisuseError(f"{name} is {value!r:.80}", "seconds, more than 0")
    if not isinstance(have, int) or have < 0:
        raise MisuseError(f"have is {have!r:.80}", "a number of blocks")
    return estimate


def recompute_s(layout: Layout, tokens_per_s: float) -> float:
    """Returns the seconds to recompute one block; 0 if the speed or the tokens per block are unknown."""
    return layout.block_tokens / tokens_per_s if tokens_per_s else 0.0


def check_blocks(keys: Sequence[Key], blocks: Buffer, block_bytes: int) -> tuple[Parts, Gpu | None]:
    """Returns one piece per key, and the GPU of all blocks. Raises MisuseError for a wrong size."""
    if hasattr(blocks, "ndim") or is_on_device(blocks):
        whole = as_bytes(blocks, "blocks", len(keys) * block_bytes)
        return Parts.consecutive(whole, len(keys), block_bytes), gpu_of(whole)
    if len(blocks) != len(keys):
        raise MisuseError(f"{len(blocks)} blocks for {len(keys)} keys", "one block per key")
    views = [as_bytes(block, f"block {i}", block_bytes) for i, block in enumerate(blocks)]
    gpus = {gpu_of(view) for view in views}
    if len(gpus) > 1:
        raise MisuseError("blocks of one call are in several places", "all in host memory, or on one GPU")
    return Parts.each(views, block_bytes), gpus.pop() if gpus else None


def check_out(keys: Sequence[Key], out: Buffer, block_bytes: int) -> tuple[Any, Gpu | None]:
    """Returns `out` as flat writable bytes, or as a list of those of each block, and its GPU.

    Raises MisuseError unless all blocks fill it, and for a list with memory of a GPU.
    """
    if not isinstance(out, list | tuple):
        flat = as_bytes(out, "out", len(keys) * block_bytes, writable=True)
        return flat, gpu_of(flat)
    if len(out) != len(keys):
        raise MisuseError(f"{len(out)} buffers for {len(keys)} keys", "one buffer per key")
    each = [as_bytes(buffer, f"out[{i}]", block_bytes, writable=True) for i, buffer in enumerate(out)]
    if any(gpu_of(buffer) is not None for buffer in each):
        raise MisuseError("a list of buffers in a GPU's memory", "one array, or acquire with `device`")
    return each, None


def check_token_ids(tokens: Any, keys: Sequence[Key], layout: Layout) -> bytes:
    """Returns token ids in their wire format, empty for None. Raises MisuseError unless all are given."""
    if tokens is None:
        return b""
    raw = as_tokens(tokens)
    need = len(keys) * layout.block_tokens
    if len(raw) != 4 * need or not layout.block_tokens:
        why = f"{len(raw) // 4} tokens for {len(keys)} keys"
        raise MisuseError(why, f"{layout.block_tokens} per key (Layout.block_tokens), {need} in all")
    return raw


def check_device(device: int | str | None) -> Gpu | None:
    """Returns the GPU of an index or UUID. Raises MisuseError if it is missing or CUDA does not work."""
    if device is None:
        return None
    if reason := why_not():
        raise MisuseError(f"device {device!r}: {reason}", "leave device out for blocks in host memory")
    return Gpu.named(device)
