"""A simulated fleet: many nodes, a router, a shared network tier, and the time to the first token.

Lives here: the requests of a fleet, made from a trace (`load`), nodes and their network tier (`node`,
`network_tier`), routers (`routing`), the simulation (`simulation`), experiments with many fleets
(`experiment`), reports and plots. May be imported from here: everything, by `cli` and tests.
"""
