"""One function for each REST path, grouped by what it reads or changes."""
