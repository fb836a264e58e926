"""Opens the double for the CUDA runtime, in every process that has this folder in PYTHONPATH."""

import ctypes

_open = ctypes.CDLL


def open_library(name, *arguments, **options):
    """Open a library as ``ctypes.CDLL`` does, but the double where CUDA's is meant."""
    if "libcudart" not in str(name):
        return _open(name, *arguments, **options)
    import cudart

    return cudart.LIBRARY


ctypes.CDLL = open_library
