"""What several commands share: options, output, keys, completions, configuration changes.

May be imported from here: everything, by commands. Must not import any command.
"""
