"""What is known about past decisions: why a block was evicted, how many prompts hit, what clients expect.

It observes. No decision about a block is made here.
"""
