"""The network tier: blocks that several nodes share through a backend.

This package has the requests that need the network (`requests`), the copies in both directions (`downloads`,
`uploads`), the deletion of shared blocks (`deletion`), the calls to the backend (`executor`), and the
composition of these parts (`tier`). It imports no siblings but `runtime.ports` and `tenancy.namespaces`.
"""
