"""A trained step as a program that needs neither Python nor torch: C, JavaScript, ONNX."""
