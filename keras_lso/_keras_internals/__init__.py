"""What this package knows of Keras's own optimizers and variables.

The only place that touches Keras's private attributes. Everything that another
version of Keras might spell differently stands here.
"""
