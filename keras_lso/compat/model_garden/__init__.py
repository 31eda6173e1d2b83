"""What the TensorFlow Model Garden has: the decays of its `lr_schedule`."""
