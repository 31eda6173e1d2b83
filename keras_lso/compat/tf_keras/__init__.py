"""Support for the configs and files of tf.keras 2 and older versions of Keras."""
