"""A folder of a filesystem that many nodes mount."""
