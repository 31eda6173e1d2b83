"""What is true of a whole tensor, where this code sees a device's shard of it.

That is so inside of `jax.shard_map` only. Elsewhere a tensor is whole for who computes
with it, however many devices hold it.
"""

import keras

if keras.backend.backend() == "jax":
    from keras_lso.backend._jax_axes import max_over_shards, sum_over_shards
else:

    def sum_over_shards(value):
        """Returns the sum of what all shards have found."""
        return value

    def max_over_shards(value):
        """Returns the largest of what all shards have found."""
        return value


__all__ = ["max_over_shards", "sum_over_shards"]
