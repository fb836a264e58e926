"""From a trained model to a bundle of verified ONNX files."""
