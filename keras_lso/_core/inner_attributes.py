"""The attributes of the inner optimizer, read and written through its wrapper."""

import keras


def passed_on(name, doc):
    """Returns a property over the inner optimizer's attribute of the same name."""

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

    built: bool

    weight_decay = passed_on("weight_decay", "The inner optimizer's weight decay.")
    clipnorm = passed_on("clipnorm", "The inner optimizer's `clipnorm`.")
    clipvalue = passed_on("clipvalue", "The inner optimizer's `clipvalue`.")
    global_clipnorm = passed_on(
        "global_clipnorm", "The inner optimizer's `global_clipnorm`."
    )
    use_ema = passed_on("use_ema", "Whether the inner optimizer averages weights.")
    ema_momentum = passed_on("ema_momentum", "The inner optimizer's EMA momentum.")
    ema_overwrite_frequency = passed_on(
        "ema_overwrite_frequency", "The inner optimizer's EMA overwrite frequency."
    )
    gradient_accumulation_steps = passed_on(
        "gradient_accumulation_steps", "The inner optimizer's accumulation window."
    )
    learning_rate = passed_on("learning_rate", "The inner learning rate.")
    lr = passed_on("learning_rate", "The inner learning rate, as in tf.keras.")

    @property
    def iterations(self):
        """The number of steps that the inner optimizer applied."""
        return self.inner_optimizer.iterations

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
