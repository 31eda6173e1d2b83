"""The primitives on TensorFlow: `framework.py` has them all."""
