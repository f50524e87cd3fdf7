"""The transfer by a ring of staging buffers on a GPU: kernels, copy engine, checksums. Transfers load it where there
is a GPU."""
