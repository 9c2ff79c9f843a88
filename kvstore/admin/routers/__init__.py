"""REST paths: one function per method and path, grouped by what they read or change.

Lives here: routers, the dependencies that their functions share (`dependencies`), and the editor of the
configuration (`configuration_editor`). May be imported from here: routers, by `app`. Routers import schemas,
access control and `daemon_state`; they hold no state of their own except the trace recorder.
"""
