"""Bridges to other libraries, each imported on request only: `numba_psa` itself needs none of them."""
