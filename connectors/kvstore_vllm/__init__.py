"""vLLM connector."""
