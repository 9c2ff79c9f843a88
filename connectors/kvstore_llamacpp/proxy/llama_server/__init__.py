"""llama-server as a program: its options, its model, its process, and requests to it."""
