"""`NovoGrad`: momentum of gradients that are normalized layer by layer."""

import keras

from keras_lso._backend import layer_rules
from keras_lso._checks import (
    check_bool,
    check_config,
    check_patterns,
    check_rate,
    check_share,
)
from keras_lso._core.exclusions import by_paths
from keras_lso._core.own_optimizer import OwnOptimizer
from keras_lso._keras_internals.variables import flat_path, is_overwritten, path_matches
from keras_lso._option_checks import check_learning_rate


class NovoGrad(OwnOptimizer):
    """Momentum of gradients that are normalized layer by layer.

    For the formula and the arguments see `keras_lso.NovoGrad`.
    """

    _tf_keras_slots = {"m": "momentums", "v": "second_moments"}

    def __init__(
        self,
        learning_rate=0.01,
        beta_1=0.95,
        beta_2=0.98,
        epsilon=1e-8,
        weight_decay_rate=0.0,
        grad_averaging=False,
        exclude_from_weight_decay=None,
        name="NovoGrad",
        **kwargs,
    ):
        learning_rate = check_learning_rate("learning_rate", learning_rate)
        beta_1 = check_share("beta_1", beta_1)
        beta_2 = check_share("beta_2", beta_2)
        epsilon = check_rate("epsilon", epsilon)
        weight_decay_rate = check_rate("weight_decay_rate", weight_decay_rate)
        grad_averaging = check_bool("grad_averaging", grad_averaging)
        no_decay = check_patterns(
            "exclude_from_weight_decay", exclude_from_weight_decay
        )
        if weight_decay_rate and kwargs.get("weight_decay"):
            raise ValueError(
                "`weight_decay_rate` adds the weights to the normalized gradient, "
                "before it enters the momentum; `weight_decay` shrinks the weights "
                "beside the step. Give one of them. Received: "
                f"weight_decay_rate={weight_decay_rate}, "
                f"weight_decay={kwargs['weight_decay']}. What other versions of "
                "NovoGrad call weight_decay is `weight_decay_rate`."
            )
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.weight_decay_rate = weight_decay_rate
        self.grad_averaging = grad_averaging
        # Not by the argument's name, which is a method of every Keras optimizer.
        self._no_decay_patterns = no_decay

    def _sort_out(self, variables):
        self._may_decay = tuple(
            not path_matches(v, self._no_decay_patterns) for v in variables
        )

    def _exclusions(self):
        patterns = self._no_decay_patterns
        return [by_paths(self, "exclude_from_weight_decay", patterns)]

    def _add_slots(self, variables):
        self.momentums = self.add_optimizer_variables(variables, "momentum")
        self.second_moments = [
            None if is_overwritten(v) else self._add_second_moment(v) for v in variables
        ]

    def _add_second_moment(self, variable):
        # The square of a norm soon overflows float16.
        dtype = keras.backend.standardize_dtype(variable.dtype)
        return self.add_variable(
            shape=(),
            dtype="float64" if dtype == "float64" else "float32",
            layout=_layout_of_a_scalar(),
            name=f"{flat_path(variable)}_second_moment",
        )

    def _make_rules(self, learning_rate):
        return {
            decays: layer_rules.NovoGrad(
                learning_rate=learning_rate,
                beta_1=self.beta_1,
                beta_2=self.beta_2,
                epsilon=self.epsilon,
                weight_decay=self.weight_decay_rate if decays else 0.0,
                grad_averaging=self.grad_averaging,
            )
            for decays in (True, False)
        }

    def _treatments(self, indices):
        return self._decaying(indices)

    def get_config(self):
        config = super().get_config()
        no_decay = self._no_decay_patterns
        config.update(
            {
                "beta_1": self.beta_1,
                "beta_2": self.beta_2,
                "epsilon": self.epsilon,
                "weight_decay_rate": self.weight_decay_rate,
                "grad_averaging": self.grad_averaging,
                # Keras keeps lists that are attributes as lists of its own kind.
                "exclude_from_weight_decay": (
                    None if no_decay is None else list(no_decay)
                ),
            }
        )
        return config

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Makes an optimizer from what `get_config` returned.

        Args:
            config: Dict.
            custom_objects: Dict of names to classes that the config refers to.

        Returns:
            A `NovoGrad`.
        """
        config = check_config("NovoGrad", config)
        return super().from_config(config, custom_objects=custom_objects)


def _layout_of_a_scalar():
    """Returns the layout of what all devices have; `None` if nothing is distributed.

    Left to itself, Keras takes that of the weight whose name is in the scalar's, and
    JAX 0.5 refuses to split a scalar.
    """
    distribution = keras.distribution.distribution()
    if distribution is None:
        return None
    return keras.distribution.TensorLayout([], distribution.device_mesh)
