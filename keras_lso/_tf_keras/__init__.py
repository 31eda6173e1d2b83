"""Support for the code, configs and files of tf.keras 2 and older versions of Keras.

`methods.py` and `loss_scaling_methods.py` are mixins of our optimizers, `configs.py`
converts configs, and the other modules read files. The core imports none of them.
"""

# The import registers the readers.
from keras_lso._tf_keras import configs  # noqa: F401
