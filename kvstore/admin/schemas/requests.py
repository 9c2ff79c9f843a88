"""Request bodies, except those that change the configuration (see `configuration`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kvstore.daemon.operator.blocks import LONGEST_S
from kvstore.types import MAX_KEY_BYTES, TENANT_PATTERN


class Body(BaseModel):
    """Base of request bodies. Refuses unknown fields."""

    model_config = ConfigDict(extra="forbid")


class StrictBody(Body):
    """Base of request bodies that convert no types."""

    model_config = ConfigDict(strict=True)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
"""Accepts integers that JSON writes as floats: 1.0 is 1."""


class Readers(Body):
    """Tenants that may read a namespace, besides its owner."""

    tenants: list[Annotated[str, Field(pattern=f"^{TENANT_PATTERN}$")]] = Field(
        max_length=64, examples=[["batch"]]
    )


class DeviceState(Body):
    """State of a device. draining: no more writes. fenced: neither writes nor reads."""

    state: Literal["serving", "draining", "fenced"]


KEY_PATTERN = rf"^([0-9a-fA-F]{{2}}){{1,{MAX_KEY_BYTES}}}$"
"""Matches a key in hex."""

_Key = Annotated[str, Field(pattern=KEY_PATTERN)]


class Prefix(Body):
    """Leading blocks of a chain: keys in hex, all of the same length."""

    keys: list[_Key] = Field(min_length=1, max_length=512, examples=[["00ff", "01ff"]])


class Pin(Body):
    """Duration of a pin, in seconds."""

    ttl_s: float = Field(gt=0, le=LONGEST_S, examples=[3600])


class RecordingWanted(StrictBody):
    """Duration of a recording, and the maximum size of its trace."""

    seconds: Annotated[float, Field(gt=0, le=86400, examples=[600])]
    max_bytes: Annotated[int, Field(ge=65536, le=64 << 20), WHOLE] = 16 << 20
