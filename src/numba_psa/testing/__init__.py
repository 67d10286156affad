"""What a porter or fuzzer needs beside the oracle. Nothing here is imported by `import numba_psa`."""
