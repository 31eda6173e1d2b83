"""Support for the code, configs and files of tf.keras 2 and older versions of Keras.

`methods.py` has methods of our optimizers, `configs.py` converts configs, and the other
modules read files.
"""
