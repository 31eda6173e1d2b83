"""The decays of the TensorFlow Model Garden's `lr_schedule`."""
