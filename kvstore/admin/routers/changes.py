"""What can be changed. Needs a token that operates; every try is written down, see `audit`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from kvstore.admin.daemon_state import DaemonState
from kvstore.admin.problem_details import ProblemError, documented
from kvstore.admin.routers.dependencies import (
    OPERATOR,
    Daemon,
    DevicePath,
    IfMatch,
    KeyPath,
    NamespacePath,
    TenantPath,
)
from kvstore.admin.routers.queries import etag, found_device, found_namespace, found_tenant, state_etag
from kvstore.admin.schemas import responses

changes = APIRouter(
    prefix="/v1",
    dependencies=[OPERATOR],
    responses=documented(400, 401, 403, 404, 409, 413, 422, 429, 503),
)


# -- tenants and namespaces


@changes.delete("/tenants/{name}/blocks", tags=["tenants"])
async def delete_blocks_of_tenant(daemon: Daemon, name: TenantPath) -> responses.Changed:
    """Deletes all that a tenant has stored, on every tier. It stays a tenant."""
    await found_tenant(daemon, name)
    return await _changed(daemon, "delete_tenant", name=name)


@changes.delete("/namespaces/{id}/blocks", tags=["namespaces"])
async def delete_blocks_of_namespace(daemon: Daemon, id: NamespacePath) -> responses.Changed:
    """Empties a namespace, on every tier. It stays open."""
    await found_namespace(daemon, id)
    return await _changed(daemon, "forget", namespace=id)


@changes.put("/namespaces/{id}/readers", tags=["namespaces"], responses=documented(412))
async def publish_namespace(
    daemon: Daemon, id: NamespacePath, readers: responses.Readers, if_match: IfMatch = None
) -> responses.Namespace:
    """Lets these tenants, and no others, read a namespace."""
    before = await found_namespace(daemon, id)
    expected = None
    if if_match is not None:
        if if_match not in ("*", etag(before)):
            raise _changed_meanwhile(before)
        expected = before.published_to
    answer = await daemon.changing.control(
        "publish", namespace=id, tenants=readers.tenants, instead_of=expected
    )
    if "published_to" in answer:
        raise _changed_meanwhile(await found_namespace(daemon, id))
    return await found_namespace(daemon, id)


def _changed_meanwhile(namespace: responses.Namespace) -> ProblemError:
    hint = f"look again: it is published to {', '.join(namespace.published_to) or 'nobody'}"
    return ProblemError(
        412, "the namespace has been changed by somebody else", hint, {"ETag": etag(namespace)}
    )


# -- devices


@changes.put("/devices/{name}/state", tags=["devices"], responses=documented(412))
async def change_state_of_device(
    daemon: Daemon, name: DevicePath, wanted: responses.DeviceState, if_match: IfMatch = None
) -> responses.Device:
    """Has a device serve, drain, or be fenced, until that is changed or the daemon restarts."""
    before = await found_device(daemon, name)
    if if_match not in (None, "*", state_etag(before)):
        raise _state_changed(before)
    expected = before.state if if_match is not None else None
    call = {"name": name, "state": wanted.state, "instead_of": expected}
    answer = await daemon.changing.control("set_device", **call)
    if "otherwise" in answer:
        raise _state_changed(responses.Device.model_validate(answer["otherwise"]))
    return responses.Device.model_validate(answer)


def _state_changed(device: responses.Device) -> ProblemError:
    etag = {"ETag": state_etag(device)}
    return ProblemError(412, "somebody else has changed its state", f"it is {device.state}", etag)


# -- blocks


@changes.delete("/namespaces/{id}/blocks/{key}", tags=["blocks"])
async def invalidate_block(daemon: Daemon, id: NamespacePath, key: KeyPath) -> responses.Changed:
    """Forgets a block, on every tier. What continues it is a miss until it is stored again."""
    return await _changed_block(daemon, "invalidate", id, key)


@changes.put("/namespaces/{id}/blocks/{key}/pin", tags=["blocks"])
async def pin_block(daemon: Daemon, id: NamespacePath, key: KeyPath, pin: responses.Pin) -> responses.Changed:
    """Keeps a block for some time, whatever else needs room."""
    return await _changed_block(daemon, "pin", id, key, ttl_s=pin.ttl_s)


@changes.delete("/namespaces/{id}/blocks/{key}/pin", tags=["blocks"])
async def unpin_block(daemon: Daemon, id: NamespacePath, key: KeyPath) -> responses.Changed:
    """Keeps a block no longer than others."""
    return await _changed_block(daemon, "unpin", id, key)


@changes.post("/namespaces/{id}/blocks/{key}/prefetch", tags=["blocks"])
async def prefetch_block(daemon: Daemon, id: NamespacePath, key: KeyPath) -> responses.Changed:
    """Brings a block up into DRAM, if there is room."""
    return await _changed_block(daemon, "prefetch", id, key)


@changes.post("/namespaces/{id}/prefetch", tags=["blocks"])
async def prefetch_prefix(daemon: Daemon, id: NamespacePath, prefix: responses.Prefix) -> responses.Changed:
    """Brings a prefix up into DRAM, as far as there is room: how many blocks are there, or on their way.

    `/v1/transfers` shows those.
    """
    await found_namespace(daemon, id)
    keys = [bytes.fromhex(key) for key in prefix.keys]
    sizes = sorted({len(key) for key in keys})
    if len(sizes) > 1:
        raise ProblemError(409, f"keys of {sizes[0]} and of {sizes[-1]} bytes", "a namespace has one size")
    return await _changed(daemon, "prefetch", namespace=id, keys=b"".join(keys), key_bytes=sizes[0])


async def _changed_block(daemon: DaemonState, call: str, id: str, key: str, **more: Any) -> responses.Changed:
    await found_namespace(daemon, id)
    raw = bytes.fromhex(key)
    changed = await _changed(daemon, call, namespace=id, keys=raw, key_bytes=len(raw), **more)
    if not changed.blocks:
        raise ProblemError(404, "no block is stored there under this key", f"GET /v1/blocks/{key} says more")
    return changed


async def _changed(daemon: DaemonState, call: str, **arguments: Any) -> responses.Changed:
    return responses.Changed(blocks=(await daemon.changing.control(call, **arguments))["value"])
