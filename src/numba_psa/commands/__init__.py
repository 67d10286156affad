"""The commands of `numba-psa`, one module each; `numba_psa.cli` assembles them."""
