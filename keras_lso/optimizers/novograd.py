"""`NovoGrad`: momentum of gradients that are normalized layer by layer."""

from dataclasses import dataclass
from typing import Any, ClassVar

import keras

from keras_lso._backend.rule import Rule
from keras_lso._backend.tensors import FLOAT32_MAX, Tensor
from keras_lso._core.exclusions import Patterns
from keras_lso._core.fields import Rate, Share, registered
from keras_lso._keras_internals.rules import from_attributes, steps_by
from keras_lso._keras_internals.variables import flat_path, is_overwritten
from keras_lso.optimizers.base import LearningRate, RuleOptimizer, arguments_of


@dataclass(frozen=True)
class NovoGradRule(Rule):
    """Momentum of normalized gradients, in the formulas of `keras_lso.NovoGrad`."""

    squares = False
    has_norms = True
    scalars: ClassVar[tuple[str, ...]] = ("second_moment",)
    slots: ClassVar[dict[str, str]] = {
        "momentum": "momentums",
        "second_moment": "second_moments",
    }
    learning_rate: Any
    beta_1: float
    beta_2: float
    epsilon: float
    weight_decay: float = 0.0
    grad_averaging: bool = False

    @classmethod
    def of_groups(cls, optimizer: Any, learning_rate: Tensor) -> dict[Any, Any]:
        weight_decays = {True: optimizer.weight_decay_rate, False: 0.0}
        return {
            decays: from_attributes(
                cls, optimizer, learning_rate=learning_rate, weight_decay=weight_decay
            )
            for decays, weight_decay in weight_decays.items()
        }

    def measured(
        self, xp: Any, g: Tensor, w: Tensor, m: Tensor, v: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns the gradient."""
        return (g,)

    def normalize(self, xp: Any, g_norm: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the new second moment, and the factor of the gradient."""
        square = xp.square(g_norm)
        moved = self.beta_2 * v + (1 - self.beta_2) * square
        moved = xp.where(v == 0, square, moved)
        total = moved + self.epsilon
        safe = xp.where(total == 0, xp.ones_like(total), total)
        factor = xp.sign(total) / xp.sqrt(safe)
        # An inf would never leave the average, and the layer would never move again.
        return xp.where(moved <= FLOAT32_MAX, moved, v), factor

    def __call__(
        self, xp: Any, select: Any, g: Tensor, w: Tensor, *moments: Tensor, norms: Any
    ) -> tuple[Tensor, ...]:
        m, v = moments
        [g_norm] = norms(g)
        new_v, factor = self.normalize(xp, g_norm, v)
        d = g * factor
        if self.weight_decay:
            d = d + w * self.weight_decay
        weight = 1 - self.beta_1 if self.grad_averaging else 1.0
        m = select(m * self.beta_1 + d * weight, m)
        return select(w - m * self.learning_rate, w), m, select(new_v, v)


@steps_by(NovoGradRule)
@registered("NovoGrad")
class NovoGrad(RuleOptimizer):
    """Optimizer that divides the gradient of each layer by its average norm.

    Adam divides each element of a gradient by the root of its second moment.
    NovoGrad has one second moment for a whole layer: an average of the squared norm
    of the layer's gradient. Its state is therefore half as large as Adam's, and a step
    does not grow with the norm of the gradient.

    ```python
    v = |g|**2 if v == 0 else beta_2 * v + (1 - beta_2) * |g|**2
    d = g / sqrt(v + epsilon) + weight_decay_rate * w
    d = (1 - beta_1) * d                                # grad_averaging=True

    m = beta_1 * m + d
    w = w - learning_rate * m
    ```

    A layer is one variable. Its first nonzero gradient sets `v`, so there is no bias
    to correct. Norms are accumulated in float32 at least, and `v` has that dtype,
    whatever the dtype of the weights. A norm below 1e-19 may count as 0. A norm above
    1.8e19 counts as infinite, and that gradient enters neither `m` nor `v`. Norms are
    taken of unscaled gradients: for float16 write
    `keras_lso.LossScaleOptimizer(NovoGrad(...))`.

    This is the formula of OpenSeq2Seq, with `epsilon` under the root. With `epsilon=0`
    it equals `optax.novograd` with `eps=0`, unless the first gradient of a layer is 0.

    Args:
        learning_rate: A float, a `keras.optimizers.schedules.LearningRateSchedule`,
            or a callable without arguments. It is lower than the learning rate of SGD,
            since normalized gradients have a norm of about 1: OpenSeq2Seq's recipe for
            Jasper starts at 0.02. Defaults to `0.01`.
        beta_1: Between 0 and 1. The decay of the momentum. Defaults to `0.95`.
        beta_2: Between 0 and 1. The decay of the second moment. With 0 each gradient is
            divided by its own norm. Defaults to `0.98`.
        epsilon: Added to the second moment, under the root. If 0, a gradient of zeros
            stays zero. Defaults to `1e-8`.
        weight_decay_rate: The factor of the weights that are added to the normalized
            gradient. Other versions of NovoGrad call it `weight_decay`. Defaults to
            `0.0`.
        grad_averaging: Whether the momentum is an average, as in Adam. This multiplies
            the steps by `1 - beta_1`. Defaults to `False`.
        exclude_from_weight_decay: Regular expressions. A variable is not decayed if
            one of them matches in its path (`"block/bn/gamma"`). Defaults to `None`:
            all variables are decayed, except those that the method of the same name
            excludes. `build` warns of a pattern that matches nothing.
        name: The name of the optimizer. Defaults to `"NovoGrad"`.
        **kwargs: The keywords of every Keras optimizer (`clipnorm`, `use_ema`,
            `gradient_accumulation_steps`, ...).

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

    _kind_of_decay = (
        "adds the weights to the normalized gradient, before it enters the momentum"
    )
    _tf_keras_slots = {"m": "momentums", "v": "second_moments"}
    beta_1: float
    beta_2: float
    epsilon: float
    grad_averaging: bool
    momentums: list[keras.Variable | None]
    second_moments: list[keras.Variable | None]

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        beta_1: Share = 0.95,
        beta_2: Share = 0.98,
        epsilon: Rate = 1e-8,
        weight_decay_rate: Rate = 0.0,
        grad_averaging: bool = False,
        exclude_from_weight_decay: Patterns = None,
        name: str = "NovoGrad",
        **kwargs: Any,
    ) -> None:
        super().__init__(**arguments_of(locals()))

    def _add_slots(self, variables: list[keras.Variable]) -> None:
        self.momentums = self.add_optimizer_variables(variables, "momentum")
        self.second_moments = [
            None if is_overwritten(v) else self._add_second_moment(v) for v in variables
        ]

    def _add_second_moment(self, variable: keras.Variable) -> keras.Variable:
        """Creates the second moment of a variable, a scalar."""
        # By default, Keras takes the layout of the weight whose name is part of the
        # scalar's name, and JAX 0.5 refuses to split a scalar.
        layout, distribution = None, keras.distribution.distribution()
        if distribution is not None:
            layout = keras.distribution.TensorLayout([], distribution.device_mesh)
        # The square of a norm soon overflows float16.
        dtype = keras.backend.standardize_dtype(variable.dtype)
        return self.add_variable(
            shape=(),
            dtype="float64" if dtype == "float64" else "float32",
            layout=layout,
            name=f"{flat_path(variable)}_second_moment",
        )
