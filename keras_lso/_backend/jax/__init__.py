"""The primitives on JAX: `framework.py` has them all."""
