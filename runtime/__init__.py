"""Serve and use a bundle over ZeroMQ. Imports neither torch nor timm nor onnx."""
