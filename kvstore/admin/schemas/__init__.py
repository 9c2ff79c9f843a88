"""Request and response bodies as pydantic models. OpenAPI documents them.

Lives here: field names, types, bounds and descriptions. May be imported from here: everything, by routers.
Must not import routers, access control or the daemon's state.
"""
