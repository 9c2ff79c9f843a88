"""Device memory through cupy, and the kernels that work on blocks in it. Without cupy this still imports."""
