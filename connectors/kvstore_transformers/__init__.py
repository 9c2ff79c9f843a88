"""transformers connector."""
