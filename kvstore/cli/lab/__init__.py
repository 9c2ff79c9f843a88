"""Commands of the lab: trace replay, sizing, comparison, trace recording, the demo.

May be imported from here: the commands, by `kvstore.cli`. They import `kvstore.lab` inside functions, because
it is slow to import and no other command needs it.
"""
