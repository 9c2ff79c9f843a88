"""What several commands share: options, tables, keys, completions, progress bars, configuration changes.

May be imported from here: everything, by commands. Must not import any command.
"""
