"""The network tier: blocks that several nodes share through a backend.

Here live the requests that need the network (`requests`), the copies in both directions (`downloads`,
`uploads`), the deletion of shared blocks (`deletion`), the calls to the backend (`executor`), and the
composition of these parts (`tier`). This package may import events and actions of `core`, `tiers.network` and
`tenancy.namespaces`. It uses the rest of the daemon through the Protocols in `ports` only.
"""
