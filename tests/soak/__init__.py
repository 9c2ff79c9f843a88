"""Hours of load on one daemon: every byte is verified, and what the daemon uses must not grow.

`python -m tests.soak --hours H --seed S --out FOLDER`. `engines` loads the daemon, `operator` changes it and
breaks things around it, `vault` has blocks that must not be lost, `samples` measures it and looks for growth.
"""
