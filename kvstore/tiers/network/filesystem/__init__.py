"""The filesystem backend: blocks as files in a folder that many nodes mount."""
