"""Write ``provider_options.json``: what ``onnxruntime-gpu`` says of the options of its TensorRT provider.

    python tests/doubles/read_provider_options.py WHEEL > tests/doubles/provider_options.json

``WHEEL`` is a wheel of ``onnxruntime-gpu`` for Linux (``pip download --no-deps``). Its Python module checks the value
of each option and has a message for each check; the messages are read from the file, and nothing of the wheel runs.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile

MESSAGE = rb"\[TensorRT\] The value for the key '(\w+)' should be ([^\0]*)"


def options_in(binary: bytes) -> dict[str, str]:
    """Return what each option's value should be, by option, from the bytes of the Python module."""
    return {key.decode(): rest.decode().strip() for key, rest in sorted(re.findall(MESSAGE, binary))}


def main(wheel: str) -> None:
    """Print the document."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if "capi/onnxruntime_pybind11_state" in name)
        print(json.dumps({"wheel": wheel.split("/")[-1], "options": options_in(archive.read(name))}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
