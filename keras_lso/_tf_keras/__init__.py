"""What code, configs and files of tf.keras 2 need, and of older versions of Keras.

`methods.py` and `loss_scaling_methods.py` are mixins of our optimizers; `configs.py`
reads old configs; the other modules read old files.
"""

# It registers its readers.
from keras_lso._tf_keras import configs  # noqa: F401
