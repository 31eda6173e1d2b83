"""What tf.keras 2 and older versions of Keras wrote: configs and files."""
