"""Paths that change tenants' blocks, namespaces, devices and single blocks. Each needs the role `operate`.

The audit log records every request, refused ones included. Not covered: the configuration, see there.
"""

from __future__ import annotations

from typing import Any

from kvstore.admin.daemon_state import DaemonState
from kvstore.admin.problem_details import ProblemError, documented
from kvstore.admin.routers.dependencies import (
    Daemon,
    DevicePath,
    IfMatch,
    KeyPath,
    NamespacePath,
    TenantPath,
    changing_router,
)
from kvstore.admin.routers.queries import etag, found_device, found_namespace, found_tenant, state_etag
from kvstore.admin.schemas import requests, responses

changing = changing_router()


# -- tenants and namespaces


@changing.delete("/tenants/{name}/blocks", tags=["tenants"])
async def delete_blocks_of_tenant(daemon: Daemon, name: TenantPath) -> responses.Changed:
    """Deletes all blocks of a tenant on every tier. The tenant stays configured."""
    await found_tenant(daemon, name)
    return await _changed(daemon, "delete_tenant", name=name)


@changing.delete("/namespaces/{id}/blocks", tags=["namespaces"])
async def delete_blocks_of_namespace(daemon: Daemon, id: NamespacePath) -> responses.Changed:
    """Deletes all blocks of a namespace on every tier. The namespace stays open."""
    await found_namespace(daemon, id)
    return await _changed(daemon, "forget", namespace=id)


@changing.put("/namespaces/{id}/readers", tags=["namespaces"], responses=documented(412))
async def publish_namespace(
    daemon: Daemon, id: NamespacePath, readers: requests.Readers, if_match: IfMatch = None
) -> responses.Namespace:
    """Publishes a namespace to these tenants and to no others."""
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
    hint = f"read it again: it is published to {', '.join(namespace.published_to) or 'no tenant'}"
    return ProblemError(412, "another request has changed the namespace", hint, {"ETag": etag(namespace)})


# -- devices


@changing.put("/devices/{name}/state", tags=["devices"], responses=documented(412))
async def change_state_of_device(
    daemon: Daemon, name: DevicePath, wanted: requests.DeviceState, if_match: IfMatch = None
) -> responses.Device:
    """Sets the state of a device until the next change or restart: serving, draining or fenced."""
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
    return ProblemError(412, "another request has changed the state", f"it is {device.state}", etag)


# -- blocks


@changing.delete("/namespaces/{id}/blocks/{key}", tags=["blocks"])
async def invalidate_block(daemon: Daemon, id: NamespacePath, key: KeyPath) -> responses.Changed:
    """Invalidates a block on every tier. Blocks that continue it are misses until it is stored again."""
    return await _changed_block(daemon, "invalidate", id, key)


@changing.put("/namespaces/{id}/blocks/{key}/pin", tags=["blocks"])
async def pin_block(daemon: Daemon, id: NamespacePath, key: KeyPath, pin: requests.Pin) -> responses.Changed:
    """Pins a block for `ttl_s` seconds: it is not evicted."""
    return await _changed_block(daemon, "pin", id, key, ttl_s=pin.ttl_s)


@changing.delete("/namespaces/{id}/blocks/{key}/pin", tags=["blocks"])
async def unpin_block(daemon: Daemon, id: NamespacePath, key: KeyPath) -> responses.Changed:
    """Removes the pin of a block."""
    return await _changed_block(daemon, "unpin", id, key)


@changing.post("/namespaces/{id}/blocks/{key}/prefetch", tags=["blocks"])
async def prefetch_block(daemon: Daemon, id: NamespacePath, key: KeyPath) -> responses.Changed:
    """Loads a block into DRAM if there is room."""
    return await _changed_block(daemon, "prefetch", id, key)


@changing.post("/namespaces/{id}/prefetch", tags=["blocks"])
async def prefetch_prefix(daemon: Daemon, id: NamespacePath, prefix: requests.Prefix) -> responses.Changed:
    """Loads a prefix into DRAM as far as there is room. Returns the blocks that are in DRAM or being loaded.

    `/v1/transfers` shows the loads.
    """
    await found_namespace(daemon, id)
    keys = [bytes.fromhex(key) for key in prefix.keys]
    sizes = sorted({len(key) for key in keys})
    if len(sizes) > 1:
        raise ProblemError(
            409, f"keys of {sizes[0]} and of {sizes[-1]} bytes", "a namespace has one key size"
        )
    return await _changed(daemon, "prefetch", namespace=id, keys=b"".join(keys), key_bytes=sizes[0])


async def _changed_block(
    daemon: DaemonState, call: str, id: str, key: str, **arguments: Any
) -> responses.Changed:
    await found_namespace(daemon, id)
    raw = bytes.fromhex(key)
    changed = await _changed(daemon, call, namespace=id, keys=raw, key_bytes=len(raw), **arguments)
    if not changed.blocks:
        raise ProblemError(
            404, "the namespace has no block with this key", f"GET /v1/blocks/{key} explains it"
        )
    return changed


async def _changed(daemon: DaemonState, call: str, **arguments: Any) -> responses.Changed:
    return responses.Changed(blocks=(await daemon.changing.control(call, **arguments))["value"])
