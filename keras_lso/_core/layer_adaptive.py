"""`LayerAdaptive`: what LARS and LAMB share, whose steps go by the norms of layers.

It has the learning rate, with its decay over time; which variables are excluded, from
the decay of weights and from the adaptation; and the trust ratios, for those who want
to look at them.
"""

from functools import partial

import keras
from keras import ops

from keras_lso._backend import backend
from keras_lso._checks import check_bool, check_config, check_patterns, check_rate
from keras_lso._config_dicts import read_object
from keras_lso._core.configs import SCHEDULE, modernise
from keras_lso._core.exclusions import by_paths
from keras_lso._core.gradients import pair_gradients
from keras_lso._core.own_optimizer import OwnOptimizer
from keras_lso._keras_internals.optimizers import index_of
from keras_lso._keras_internals.rates import updates_of
from keras_lso._keras_internals.rules import columns_of
from keras_lso._keras_internals.variables import path_matches, path_of
from keras_lso._option_checks import check_learning_rate


class LayerAdaptive(OwnOptimizer):
    """An optimizer whose rule is a `LayerAdaptive` of `layer_rules.py`.

    A subclass makes one rule for each treatment, a pair of bools: whether a variable
    decays, and whether it adapts.

    Attributes:
        _default_learning_rate: Float, with which `lr` is no contradiction.
        _kind_of_decay: String, what `weight_decay_rate` is, for an error.
    """

    _default_learning_rate: float
    _kind_of_decay: str

    def __init__(
        self,
        learning_rate,
        weight_decay_rate,
        exclude_from_weight_decay,
        exclude_from_layer_adaptation,
        exclude_1d,
        name,
        **kwargs,
    ):
        learning_rate = self._given_rate(learning_rate, kwargs)
        decay = check_rate("decay", kwargs.pop("decay", 0.0))
        weight_decay_rate = check_rate("weight_decay_rate", weight_decay_rate)
        no_decay = check_patterns(
            "exclude_from_weight_decay", exclude_from_weight_decay
        )
        no_adaptation = check_patterns(
            "exclude_from_layer_adaptation", exclude_from_layer_adaptation
        )
        exclude_1d = check_bool("exclude_1d", exclude_1d)
        self._check_decays(weight_decay_rate, kwargs.get("weight_decay"))
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.decay = decay
        self.weight_decay_rate = weight_decay_rate
        self.exclude_1d = exclude_1d
        # Not by the argument's name, which is a method of every Keras optimizer.
        self._no_decay_patterns = no_decay
        self.exclude_from_layer_adaptation = no_adaptation

    @classmethod
    def _given_rate(cls, learning_rate, kwargs):
        """Returns the learning rate, which `kwargs` may hold as `lr`."""
        if "lr" not in kwargs:
            return check_learning_rate("learning_rate", learning_rate)
        if learning_rate != cls._default_learning_rate:
            raise TypeError(
                "`lr` is another name of `learning_rate`: give one of them. Received: "
                f"learning_rate={learning_rate!r}, lr={kwargs['lr']!r}"
            )
        return check_learning_rate("lr", kwargs.pop("lr"))

    @classmethod
    def _check_decays(cls, weight_decay_rate, weight_decay):
        """Refuses two kinds of weight decay at once."""
        if weight_decay_rate and weight_decay:
            name = cls.__name__
            raise ValueError(
                f"`weight_decay_rate` {cls._kind_of_decay}; `weight_decay` shrinks the "
                "weights beside the step. Give one of them. Received: "
                f"weight_decay_rate={weight_decay_rate}, weight_decay={weight_decay}. "
                f"{name} as published has `weight_decay_rate` only."
            )

    @property
    def lr(self):
        """The learning rate, as tf.keras called it."""
        return self.learning_rate

    @lr.setter
    def lr(self, value):
        self.learning_rate = value

    def _sort_out(self, variables):
        no_decay = self._no_decay_patterns
        no_adaptation = self.exclude_from_layer_adaptation
        if no_adaptation is None:
            no_adaptation = no_decay
        self._may_decay = tuple(not self._is_excluded(no_decay, v) for v in variables)
        self._adapts = tuple(not self._is_excluded(no_adaptation, v) for v in variables)

    def _exclusions(self):
        lists = {
            "exclude_from_weight_decay": self._no_decay_patterns,
            "exclude_from_layer_adaptation": self.exclude_from_layer_adaptation,
        }
        return [
            by_paths(
                self,
                argument,
                patterns,
                partial(self._is_excluded, patterns),
                # With it a list in vain, such as that of a recipe, costs nothing.
                is_alone=not self.exclude_1d,
            )
            for argument, patterns in lists.items()
        ]

    def _is_excluded(self, patterns, variable):
        if self.exclude_1d and len(variable.shape) < 2:
            return True
        return path_matches(variable, patterns)

    def decayed(self, learning_rate):
        """Returns the learning rate of this step, after `decay`.

        Args:
            learning_rate: Scalar tensor.

        Returns:
            A scalar tensor.
        """
        if not self.decay:
            return learning_rate
        learning_rate = ops.convert_to_tensor(learning_rate)
        steps = ops.cast(updates_of(self), learning_rate.dtype)
        return learning_rate / (1 + self.decay * steps)

    def trust_ratios(self, grads, variables=None):
        """Returns by how much each variable's step is rescaled.

        Args:
            grads: List of unscaled gradients, one for each variable; None where a
                variable has none.
            variables: List of variables. Defaults to those that the optimizer was
                built for.

        Returns:
            Dict of the variables' paths to scalar tensors, those excluded from the
            adaptation left out.

        Raises:
            ValueError: If the optimizer has not been built yet.

        Example:

        >>> import keras, keras_lso
        >>> optimizer = keras_lso.LARS(1.0, eeta=0.1)
        >>> w = keras.Variable([3.0, 4.0], name="w")
        >>> optimizer.build([w])
        >>> ratios = optimizer.trust_ratios([keras.ops.array([0.0, 2.0])])
        >>> float(ratios["w"])  # 0.1 * |w| / |g|
        0.25
        """
        if not self.built:
            raise ValueError(
                f"To call `trust_ratios`, {type(self).__name__} must be built. Call "
                "`optimizer.build(trainable_variables)` first."
            )
        grads, variables = pair_gradients(self, grads, variables)
        indices = [index_of(self, v) for v in variables]
        made = self._make_rules(ops.convert_to_tensor(self.learning_rate))
        treatments = self._treatments(indices)
        ratios = {}
        for index, grad, variable, treatment in zip(
            indices, grads, variables, treatments, strict=True
        ):
            rule = made[treatment]
            if grad is None or rule.trust_ratio is None:
                continue
            grad = backend.in_float32(backend.to_dense(grad))
            slots = [column[index] for column in columns_of(type(rule), self)]
            norms = backend.norms_of(rule, grad, variable, *slots)
            ratio = rule.trust_ratio(*norms, rule.weight_decay)
            ratios[path_of(variable)] = ops.stop_gradient(ratio)
        return ratios

    def _treatments(self, indices):
        decaying = self._decaying(indices)
        return [(d, self._adapts[i]) for d, i in zip(decaying, indices, strict=True)]

    def get_config(self):
        config = super().get_config()
        config.update(
            {
                "weight_decay_rate": self.weight_decay_rate,
                "exclude_from_weight_decay": _as_list(self._no_decay_patterns),
                "exclude_from_layer_adaptation": _as_list(
                    self.exclude_from_layer_adaptation
                ),
                "exclude_1d": self.exclude_1d,
                "decay": self.decay,
            }
        )
        return config

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Makes an optimizer from what `get_config` returned.

        Args:
            config: Dict. One of the Model Garden's optimizer of this name will do.
            custom_objects: Dict of names to classes that the config refers to.

        Returns:
            An optimizer of this class.
        """
        config = check_config(cls.__name__, config)
        learning_rate = config.get("learning_rate")
        if isinstance(learning_rate, dict):
            config["learning_rate"] = read_object(
                keras.optimizers.schedules.deserialize,
                modernise(SCHEDULE, learning_rate, custom_objects),
                "`learning_rate`",
                custom_objects,
            )
        return super().from_config(config, custom_objects=custom_objects)


def _as_list(patterns):
    # Keras tracks the lists that are attributes, and hands out its own kind.
    return None if patterns is None else list(patterns)
