"""The knowledge that this package has of Keras's own optimizers and variables.

Only these modules touch Keras's private attributes. Everything that another version of
Keras might spell differently is here.
"""
