"""Rounds in the tools that ML engineers compare runs with: JSON lines, TensorBoard, MLflow."""
