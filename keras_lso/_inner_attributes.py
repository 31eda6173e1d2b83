"""The attributes of the inner optimizer, read and written through its wrapper."""

import keras


def _read_through(name, doc):
    """Makes a property over the inner optimizer's attribute of the same name."""

    def get(self):
        return getattr(self.inner_optimizer, name)

    def set_(self, value):
        # Keras's constructor assigns its defaults before there is an inner one.
        if "inner_optimizer" in vars(self):
            setattr(self.inner_optimizer, name, value)

    return property(get, set_, doc=doc)


class InnerAttributes(keras.optimizers.Optimizer):
    """A wrapper's view of its `inner_optimizer`'s hyperparameters.

    Those that every Keras optimizer has are properties. Any other public
    attribute (`momentum`, `beta_1`, a user's own) is looked up when asked for.
    """

    weight_decay = _read_through("weight_decay", "The inner optimizer's weight decay.")
    clipnorm = _read_through("clipnorm", "The inner optimizer's `clipnorm`.")
    clipvalue = _read_through("clipvalue", "The inner optimizer's `clipvalue`.")
    global_clipnorm = _read_through(
        "global_clipnorm", "The inner optimizer's `global_clipnorm`."
    )
    use_ema = _read_through("use_ema", "Whether the inner optimizer averages weights.")
    ema_momentum = _read_through("ema_momentum", "The inner optimizer's EMA momentum.")
    ema_overwrite_frequency = _read_through(
        "ema_overwrite_frequency", "The inner optimizer's EMA overwrite frequency."
    )
    gradient_accumulation_steps = _read_through(
        "gradient_accumulation_steps", "The inner optimizer's accumulation window."
    )
    learning_rate = _read_through("learning_rate", "The inner learning rate.")
    lr = _read_through("learning_rate", "The inner learning rate, as in tf.keras.")

    @property
    def iterations(self):
        """The number of steps that the inner optimizer applied."""
        return self.inner_optimizer.iterations

    @property
    def loss_scale_factor(self):
        """None: the loss scale of a `LossScaleOptimizer` is its own."""
        return None

    @loss_scale_factor.setter
    def loss_scale_factor(self, value):
        if value is not None:
            raise ValueError(
                "LossScaleOptimizer scales the loss itself and has no "
                "`loss_scale_factor`. For a fixed scale write "
                f"`LossScaleOptimizer(inner_optimizer, dynamic=False, "
                f"initial_scale={value})`."
            )

    def exclude_from_weight_decay(self, var_list=None, var_names=None):
        """Excludes variables from the inner optimizer's weight decay.

        Args:
            var_list: List of variables to exclude.
            var_names: List of strings; a variable is excluded if its name
                contains one of them.
        """
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def __getattr__(self, name):
        inner = vars(self).get("inner_optimizer")
        if inner is None or name.startswith("_"):
            raise AttributeError(
                f"'{type(self).__name__}' object has no attribute '{name}'"
            )
        return getattr(inner, name)

    def __setattr__(self, name, value):
        if self._belongs_to_inner(name):
            setattr(self.inner_optimizer, name, value)
        else:
            super().__setattr__(name, value)

    def _belongs_to_inner(self, name):
        inner = vars(self).get("inner_optimizer")
        return (
            inner is not None
            and not name.startswith("_")
            and name not in vars(self)
            and not hasattr(type(self), name)
            and hasattr(inner, name)
        )
