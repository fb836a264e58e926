"""Serve and use a bundle over ZeroMQ. Imports neither torch nor timm nor onnx."""

import logging

logging.getLogger("ls_edge").addHandler(logging.NullHandler())
