"""The primitives on PyTorch: `framework.py` has them all."""
