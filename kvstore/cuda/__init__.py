"""Device memory through cupy, and the kernels that work on blocks in it. Without cupy this still imports.

Lives here: devices, buffers and streams, CUDA IPC, checksums and FP8 on the GPU, conversion of other
libraries' arrays. May be imported from here: everything, by `tiers`, `client` and `fp8`. Must not import any
other package but `errors` and `types`. Details: README.md.
"""
