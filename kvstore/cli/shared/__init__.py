"""Options, tables, keys and completions that several commands share."""
