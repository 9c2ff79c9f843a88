"""Documents in any order: stored chunks are moved to their place in a prompt, and partly recomputed."""
