"""From a run to a bundle: split, ONNX, verification against PyTorch."""
