"""Commands of operators at run time: status, devices, settings, namespaces, event log, traces.

A command is a method with `@command` in the file of its noun; `command` finds and runs it. May be imported
from here: commands and the event log, by the composition and `requests`. May import `runtime`, `tenancy` and
`network`; must not import `server`.
"""
