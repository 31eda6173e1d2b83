"""`NovoGrad`: momentum of gradients that are normalized layer by layer."""

import keras

from keras_lso import adapters
from keras_lso._checks import (
    check_bool,
    check_learning_rate,
    check_patterns,
    check_rate,
    check_share,
)
from keras_lso._config_dicts import check_config
from keras_lso._stored_state import LoadsAllOrNothing
from keras_lso._tf_keras_methods import TFKerasMethods
from keras_lso.backend import rules


@keras.saving.register_keras_serializable("keras_lso", name="NovoGrad")
class NovoGrad(TFKerasMethods, LoadsAllOrNothing, adapters.RuleOptimizer):
    """Optimizer that divides the gradient of each layer by its usual norm.

    Adam divides each element of a gradient by the root of its second moment.
    NovoGrad has one second moment for a whole layer: an average of the squared norm
    of its gradient. So its state is half as large as Adam's, and a gradient that is
    large everywhere makes no larger step.

    ```python
    v = |g|**2 if v == 0 else beta_2 * v + (1 - beta_2) * |g|**2
    d = g / sqrt(v + epsilon) + weight_decay_rate * w
    d = (1 - beta_1) * d                                # grad_averaging=True

    m = beta_1 * m + d
    w = w - learning_rate * m
    ```

    A layer is one variable. Its first gradient that is not zero sets `v`, so that
    there is no bias to correct. Norms are summed up in float32 at least, and `v` is
    kept in it, whatever the dtype of the weights. A norm below 1e-19 may count as 0;
    one above 1.8e19 counts as infinite, and nothing of that gradient enters `m` or
    `v`. Norms are of unscaled gradients: wrap it as
    `keras_lso.LossScaleOptimizer(NovoGrad(...))` for float16.

    This is the formula of OpenSeq2Seq, with `epsilon` under the root. (Its code
    computes the average but never stores it: what it trained with is `beta_2=0`.)
    With `epsilon=0` it is `optax.novograd` with `eps=0`, as long as the first
    gradient of every layer is not zero.

    Args:
        learning_rate: A float, a `keras.optimizers.schedules.LearningRateSchedule`,
            or a callable without arguments that returns the value to use. The norm
            of what enters the momentum is about 1 whatever the loss is, so that it
            is lower than with SGD: OpenSeq2Seq's recipe for Jasper starts at 0.02.
            Defaults to `0.01`.
        beta_1: Float between 0 and 1. The share of the momentum that stays.
            Defaults to `0.95`.
        beta_2: Float between 0 and 1. The share of the second moment that stays.
            With 0 each gradient is divided by its own norm. Defaults to `0.98`.
        epsilon: Float. Added to the second moment, under the root. If 0, a gradient
            of zeros stays zero. Defaults to `1e-8`.
        weight_decay_rate: Float. The factor of the weights that are added to the
            normalized gradient. Other versions of NovoGrad call it `weight_decay`,
            which in Keras is another thing. Defaults to `0.0`.
        grad_averaging: Bool. Whether the momentum is an average, as in Adam: the
            steps are then `1 - beta_1` as long. Defaults to `False`.
        exclude_from_weight_decay: List of regular expressions. A variable whose
            path (`"block/bn/gamma"`) holds a match of one of them is not decayed.
            Defaults to `None`: all are. A variable that Keras's method of the same
            name excludes is not decayed either.
        name: String. The name of the optimizer. Defaults to `"NovoGrad"`.
        **kwargs: The keywords of every Keras optimizer (`clipnorm`,
            `global_clipnorm`, `clipvalue`, `use_ema`, `ema_momentum`,
            `ema_overwrite_frequency`, `gradient_accumulation_steps`,
            `weight_decay`, ...).

    Attributes:
        momentums: List of variables, the `m` of each trainable variable.
        second_moments: List of scalar variables, the `v` of each.

    Raises:
        ValueError, TypeError: If an argument is none of the above.

    Example:

    >>> import keras, keras_lso
    >>> optimizer = keras_lso.NovoGrad(learning_rate=0.5, beta_1=0.9)
    >>> w = keras.Variable([3.0, 4.0])
    >>> optimizer.apply([keras.ops.array([0.0, 100.0])], [w])
    >>> print(w.numpy())  # the direction of the gradient is 0, 1
    [3.  3.5]
    >>> optimizer.apply([keras.ops.array([0.0, 0.0])], [w])
    >>> print(w.numpy())  # the momentum is 0, 0.9
    [3.   3.05]

    References:

    - [Ginsburg et al., 2019, Stochastic Gradient Methods with Layer-wise Adaptive
        Moments for Training of Deep Networks](https://arxiv.org/abs/1905.11286)
    - [OpenSeq2Seq, `NovoGrad`](
        https://github.com/NVIDIA/OpenSeq2Seq/blob/master/open_seq2seq/optimizers/novograd.py)
    """

    _rule_class = rules.NovoGrad
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

    def build(self, variables):
        """Creates the momentum and the second moment of each variable.

        Args:
            variables: List of the trainable variables.
        """
        if self.built:
            return
        super().build(variables)
        self.momentums = self.add_optimizer_variables(variables, "momentum")
        self.second_moments = [
            None if adapters.is_overwritten(v) else self._add_second_moment(v)
            for v in variables
        ]
        self._may_decay = tuple(
            not adapters.path_matches(v, self._no_decay_patterns) for v in variables
        )

    def _add_second_moment(self, variable):
        # The square of a norm soon overflows float16.
        dtype = keras.backend.standardize_dtype(variable.dtype)
        return self.add_variable(
            shape=(),
            dtype="float64" if dtype == "float64" else "float32",
            layout=_layout_of_a_scalar(),
            name=f"{adapters.flat_path(variable)}_second_moment",
        )

    def _make_rules(self, indices, learning_rate):
        made = {
            decays: rules.NovoGrad(
                learning_rate=learning_rate,
                beta_1=self.beta_1,
                beta_2=self.beta_2,
                epsilon=self.epsilon,
                weight_decay=self.weight_decay_rate if decays else 0.0,
                grad_averaging=self.grad_averaging,
            )
            for decays in (True, False)
        }
        variables = adapters.trainable_variables(self)
        return [made[adapters.uses_weight_decay(self, variables[i])] for i in indices]

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
