"""The process: runs the core's actions, serves the socket, starts and stops."""
