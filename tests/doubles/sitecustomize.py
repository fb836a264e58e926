"""Opens the double for the CUDA runtime, and for the driver, in every process that has this folder in PYTHONPATH."""

import ctypes

_open = ctypes.CDLL


def open_library(name, *arguments, **options):
    """Open a library as ``ctypes.CDLL`` does, but the double where one of CUDA's is meant."""
    if "libcuda" not in str(name):
        return _open(name, *arguments, **options)
    import cudart

    return cudart.LIBRARY


ctypes.CDLL = open_library
