"""Paths of the configuration: all settings, and the settings of one tenant or NVMe device.

Every change can be tried as a dry run and made conditional on an ETag. Not covered: tokens, see `tokens`.
"""

from __future__ import annotations

from typing import Any

from fastapi import Response

from kvstore.admin.daemon_state import DaemonState
from kvstore.admin.problem_details import ProblemError, documented
from kvstore.admin.routers.configuration_editor import TOKENS, ConditionalEdit, Edit, quoted, read_part
from kvstore.admin.routers.dependencies import (
    VIEWER,
    Daemon,
    DevicePath,
    TenantPath,
    changing_router,
    reading_router,
)
from kvstore.admin.schemas import configuration as views
from kvstore.config import (
    NvmeDevice,
    Tenant,
    Values,
    device_patch,
    device_table,
    device_values,
    difference,
    parse_write_budget,
)

reading = reading_router("configuration")
changing = changing_router("configuration")


# -- all settings


@reading.get("/settings", dependencies=[VIEWER])
async def show_settings(daemon: Daemon, response: Response) -> views.Settings:
    """Settings that the file or later changes set. All others have their defaults. Tokens are left out."""
    shown = await daemon.client.control("settings")
    response.headers["ETag"] = quoted(shown["etag"])
    return views.Settings(settings=_without_tokens(shown["value"]), changes=_without_tokens(shown["changes"]))


@changing.patch("/settings", responses=documented(412))
async def change_settings(editor: ConditionalEdit, patch: dict[str, Any]) -> views.SettingsChanged:
    """Changes settings by a JSON merge patch (RFC 7396) with the file's keys; null restores a default."""
    return await editor.patch((), patch)


@changing.post("/reload")
async def reload(editor: Edit) -> views.Reloaded:
    """Reads the configuration file again, as SIGHUP does, for the daemon and for this interface."""
    return views.Reloaded.model_validate(await editor.reload())


def _without_tokens(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _without_tokens(inner) for name, inner in value.items() if name != TOKENS}


# -- tenants


@reading.get("/tenants/{name}/settings", dependencies=[VIEWER], responses=documented(404, 422))
async def show_tenant_settings(daemon: Daemon, response: Response, name: TenantPath) -> views.TenantSettings:
    """Members, quotas and bandwidth of a tenant. Tokens have a path of their own."""
    tenant = Tenant.model_validate(await configured_tenant(daemon, name, response))
    return views.TenantSettings.model_validate(tenant.model_dump(mode="json", exclude={TOKENS}))


@changing.put("/tenants/{name}/settings", responses=documented(412))
async def put_tenant_settings(
    editor: ConditionalEdit, name: TenantPath, settings: views.TenantSettings
) -> views.SettingsChanged:
    """Creates a tenant, or replaces its settings. Its tokens stay."""

    def patch(before: Values | None) -> Values:
        wanted = settings.model_dump(exclude_defaults=True)
        if before and TOKENS in before:
            wanted[TOKENS] = before[TOKENS]
        return difference(before or {}, wanted)

    return await editor.edit(("tenants", name), patch)


@changing.delete("/tenants/{name}/settings", responses=documented(412))
async def remove_tenant(editor: ConditionalEdit, name: TenantPath) -> views.SettingsChanged:
    """Removes a tenant from the configuration. Its blocks stay stored until `DELETE .../blocks`."""
    await configured_tenant(editor.daemon, name)
    return await editor.patch(("tenants", name), {"tenants": {name: None}})


async def configured_tenant(daemon: DaemonState, name: str, response: Response | None = None) -> Values:
    """Returns the settings of a tenant and sets the response's ETag. Raises ProblemError 404."""
    settings = await read_part(daemon, ("tenants", name), response)
    if settings is None:
        hint = "PUT creates it; GET /v1/tenants also lists tenants that only have stored blocks"
        raise ProblemError(404, f"no tenant {name!r} is configured", hint)
    return settings


# -- devices


@reading.get("/devices/{name}/settings", dependencies=[VIEWER], responses=documented(404, 422))
async def show_device_settings(daemon: Daemon, response: Response, name: DevicePath) -> views.DeviceSettings:
    """Folder, limit and write budget of an NVMe device. `nvme` is the first one."""
    device = NvmeDevice.model_validate(await _configured_device(daemon, name, response))
    is_multiple = isinstance(device.write_budget, str) and device.write_budget.endswith("x")
    budget = device.write_budget if is_multiple else parse_write_budget(device.write_budget, device.limit)
    return views.DeviceSettings(path=str(device.path), limit=device.limit, write_budget=budget)


@changing.put("/devices/{name}/settings", responses=documented(412))
async def put_device_settings(
    editor: ConditionalEdit, name: DevicePath, settings: views.DeviceSettings
) -> views.SettingsChanged:
    """Adds a device with an existing, empty folder to the NVMe tier, or changes its limit and budget."""
    wanted = settings.model_dump()
    return await editor.edit(
        device_table(name), lambda table: difference(device_values(name, table) or {}, wanted)
    )


@changing.delete("/devices/{name}/settings", responses=documented(412))
async def remove_device(editor: ConditionalEdit, name: DevicePath) -> views.SettingsChanged:
    """Removes a device. It takes no more writes and is read until it is empty; then its blocks are gone."""
    await _configured_device(editor.daemon, name)
    return await editor.patch(device_table(name), device_patch(name, None))


async def _configured_device(daemon: DaemonState, name: str, response: Response | None = None) -> Values:
    settings = device_values(name, await read_part(daemon, device_table(name), response))
    if settings is None:
        raise ProblemError(404, f"no device {name!r:.80} is configured", "PUT adds it")
    return settings
