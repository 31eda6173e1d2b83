"""The knowledge of Keras's own optimizers and variables, and of private attributes."""
