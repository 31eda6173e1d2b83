"""The coefficients of a step, the registry of rules, and those of Keras's optimizers.

A rule is a class with a whole step, in Keras's own formulas in float32: see
`_backend/rule.py`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import keras
import numpy as np
from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.rule import LayerAdaptiveRule, Rule, TrustRatio, always
from keras_lso._backend.tensors import Tensor, Variables
from keras_lso._keras_internals.optimizers import (
    bases_of,
    is_of_packages,
    iteration_variable,
    most_accumulation_steps,
    optimizers_in,
    public_class,
    steps_in_dtype_of_variables,
    uses_weight_decay,
    variables_of,
)
from keras_lso._keras_internals.variables import is_overwritten, read

# --- Coefficients, which have to be finite ------------------------------------------


def rate_given_to(optimizer: keras.Optimizer) -> Any:
    """Returns the learning rate as it was set: a variable, schedule or callable."""
    return optimizer._learning_rate


def schedules_in(rate: Any) -> list[Any]:
    """Returns the schedules and other callables that compute a rate, a list."""
    if isinstance(rate, list | tuple):
        return [found for member in rate for found in schedules_in(member)]
    if isinstance(rate, keras.Variable) or not callable(rate):
        return []
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    members = list(vars(rate).values()) if is_schedule else []
    return [rate, *schedules_in(members)]


def rate_of(optimizer: keras.Optimizer) -> Tensor:
    """Returns the learning rate of this step, a scalar computed on the device."""
    if isinstance(optimizer._learning_rate, keras.Variable):
        return read(optimizer._learning_rate)

    def rate() -> Tensor:
        value = ops.convert_to_tensor(optimizer.learning_rate)
        # A schedule or a callable may return an integer, or an array of one number.
        is_whole = "int" in keras.backend.standardize_dtype(value.dtype)
        value = ops.cast(value, "float32") if is_whole else value
        return ops.reshape(value, ()) if value.shape else value

    steps = ops.convert_to_tensor(iteration_variable(optimizer))
    return backend.without_host(rate, near=steps)


def _rate_in_step(optimizer: keras.Optimizer) -> Tensor:
    """Returns the rate in the dtype in which a step multiplies by it."""
    # Keras's optimizers cast the rate to the dtype of each weight. For a float16 weight
    # without a master, a rate above 65,504 becomes inf.
    rate = rate_of(optimizer)
    casts = steps_in_dtype_of_variables(optimizer)
    if not casts or all(v.dtype != "float16" for v in variables_of(optimizer)):
        return rate
    return ops.cast(rate, "float16")


def rates_of(optimizers: list[keras.Optimizer], are_rescaled: bool) -> list[Tensor]:
    """Returns the learning rates, tensors, that the next step may multiply by.

    `are_rescaled`: see `RuleStep.rates_are_finite`.
    """
    rates = []
    for optimizer in optimizers:
        count = optimizer.gradient_accumulation_steps
        if are_rescaled or not count:
            rates.append(_rate_in_step(optimizer))
            continue
        may_end = (read(iteration_variable(optimizer)) + 1) % count == 0
        if backend.value_if_on_host(may_end) is not False:
            rate = backend.scalar(_rate_in_step(optimizer), "float32")
            zero = backend.xp.zeros_like(rate)
            rates.append(backend.xp.where(may_end, rate, zero))
    return rates


def updates_of(optimizer: keras.Optimizer) -> Tensor:
    """Returns the number of times the optimizer has updated its variables, a tensor."""
    # With accumulation `optimizer.iterations` would make a copy to the device.
    steps = read(optimizer._iterations)
    count = optimizer.gradient_accumulation_steps
    return steps // count if count else steps


# Numbers that are None at first, unless they are given.
GIVEN_NUMBERS = ("weight_decay", "clipnorm", "global_clipnorm", "clipvalue")


class Hyperparameters:
    """The public numbers of some optimizers, which users may change."""

    # In a user's own class, a number may be infinite from the start, to limit nothing.

    def __init__(self, optimizers: list[keras.Optimizer]):
        self._names = [(o, _numbers_of(o)) for o in optimizers]

    def prepare(self) -> None:
        """Makes Python's numbers of NumPy's; raises for a second loss scale."""
        # Python's take the dtype of a tensor.
        for optimizer, names in self._names:
            factor = optimizer.loss_scale_factor
            if factor is not None:
                raise ValueError(
                    f"The inner optimizer has loss_scale_factor={factor}, by which it "
                    "would divide gradients that LossScaleOptimizer has unscaled "
                    "already. Set it to None. For a fixed loss scale write "
                    "`LossScaleOptimizer(inner_optimizer, dynamic=False, "
                    f"initial_scale={factor})`."
                )
            state = vars(optimizer)
            for name in names:
                if isinstance(state.get(name), np.floating):
                    setattr(optimizer, name, float(state[name]))

    def are_numbers(self) -> bool:
        """Whether all are finite numbers that the host knows, or None."""
        # A tensor may be written to.
        values = [vars(o).get(name) for o, names in self._names for name in names]
        is_known = set(map(type, values)) <= {type(None), bool, int, float}
        return is_known and self.find_not_finite() is None

    def find_not_finite(self) -> str | None:
        """Returns in words which number no step can be taken with, or None."""
        # Only numbers that the host knows are checked, and learning rates are tensors.
        for optimizer, names in self._names:
            state = vars(optimizer)
            for name in names:
                value = state.get(name)
                # An infinite `clipvalue` clips nothing.
                if isinstance(value, _FLOATS) and not (
                    math.isfinite(value) or (name == "clipvalue" and value > 0)
                ):
                    return f"`{name}` of {type(optimizer).__name__} is {value}"
        return None


_FLOATS = (float, np.floating)


def _numbers_of(optimizer: keras.Optimizer) -> list[str]:
    """Returns the names of the numbers that have to stay finite, a list."""
    is_of_user = not is_of_packages(type(optimizer))
    numbers = [
        name
        for name, value in vars(optimizer).items()
        if isinstance(value, (int, *_FLOATS))
        and not name.startswith("_")
        and not (is_of_user and math.isinf(value))
    ]
    return list(dict.fromkeys([*GIVEN_NUMBERS, *numbers]))


def why_skipped(
    optimizer: keras.Optimizer, hyperparameters: Hyperparameters | None = None
) -> str | None:
    """Returns a message on a coefficient that is not finite, or None; reads rates."""
    if hyperparameters is None:
        hyperparameters = Hyperparameters(optimizers_in(optimizer))
    not_finite = hyperparameters.find_not_finite()
    if not_finite is not None:
        return f"{not_finite}. {_ADVICE}"
    for base in bases_of(optimizer):
        rate = float(ops.convert_to_numpy(rate_of(base)))
        if not math.isfinite(float(ops.convert_to_numpy(_rate_in_step(base)))):
            step = int(ops.convert_to_numpy(iteration_variable(base)))
            source, computed = rate_given_to(base), ""
            if not isinstance(source, keras.Variable):
                name = getattr(source, "__name__", type(source).__name__)
                computed = f", as `{name}` computes it"
            if math.isfinite(rate):
                computed += ", and inf in float16, to which a float16 weight casts it"
            return f"The learning rate is {rate} at step {step}{computed}. {_ADVICE}"
    return None


_ADVICE = (
    "A step with such a number is skipped, whatever the gradients are, and the loss "
    "scale stays as it is. Set a finite number, such as `optimizer.learning_rate = "
    "1e-3`, or correct the schedule."
)


# --- The registry -------------------------------------------------------------------

_ClassT = TypeVar("_ClassT", bound=type)
_RuleT = TypeVar("_RuleT", bound=Rule)

# Keyed by the optimizer's class, which may have a rule for each of its forms.
_rules: dict[type, list[type[Rule]]] = {}


def rule_of(*classes: type) -> Callable[[type[_RuleT]], type[_RuleT]]:
    """Returns a decorator that makes a class the rule of these optimizers."""
    # Their subclasses do not get the rule, since they may do something else.

    def decorate(rule: type[_RuleT]) -> type[_RuleT]:
        for cls in classes:
            _rules.setdefault(cls, []).append(rule)
        _rules_of.cache_clear()
        return rule

    return decorate


def steps_by(rule: type[Rule]) -> Callable[[_ClassT], _ClassT]:
    """Returns a decorator that gives a class of optimizers its rule."""

    def decorate(cls: Any) -> Any:
        rule_of(cls)(rule)
        # A subclass may do more than the rule, and has no fused step. It updates
        # variable by variable, by the rule that it inherits.
        cls._rule = rule
        return cls

    return decorate


@functools.cache
def _rules_of(cls: type) -> list[type[Rule]]:
    """Returns the rules of a class; for a private class, those of its public class."""
    return _rules.get(public_class(cls), [])


def registered_rule(optimizer: keras.Optimizer) -> type[Rule] | None:
    """Returns the rule that the optimizer steps by, None if it has none."""
    for rule in _rules_of(optimizer.__class__):
        if rule.is_rule_of(optimizer):
            return rule
    return None


def classes_with_moments() -> list[str]:
    """Returns the names of the optimizers whose slots may be rounded, a list."""
    of_classes = ((cls, rule) for cls, rules in _rules.items() for rule in rules)
    return sorted({cls.__name__ for cls, rule in of_classes if rule.has_moments})


def headroom_of(optimizer: keras.Optimizer) -> float:
    """Returns by what factor gradients have to stay in the range of float32."""
    bases = bases_of(optimizer)
    # An infinite square would make a second moment NaN or, on PyTorch, infinite for
    # good. A step that clips by the norm of all checks the square of that already.
    clips = any(o.global_clipnorm for o in bases)
    if not clips and any(_squares_gradients(o) for o in bases):
        return 2.0**64
    # Neither the sum of micro-batches nor its norm overflows then, however rounded.
    return max(2.0 * most_accumulation_steps(optimizer), 1.0)


def _squares_gradients(optimizer: keras.Optimizer) -> bool:
    """Whether a step squares the elements of gradients before any clipping."""
    if optimizer.clipnorm or optimizer.clipvalue:
        return False
    rule = registered_rule(optimizer)
    if rule is None:
        return not isinstance(optimizer, _WITHOUT_SQUARES)
    # Not inherited, since a subclass may square.
    return vars(rule).get("squares", True)


_WITHOUT_SQUARES = keras.optimizers.SGD, keras.optimizers.Lion, keras.optimizers.Adamax


def slot_lists_of(rule: type[Rule], optimizer: keras.Optimizer) -> list[Variables]:
    """Returns the optimizer's lists of slots, in the order of `rule.slots`."""
    return [getattr(optimizer, attribute) for attribute in rule.slots.values()]


def from_attributes(rule: Any, optimizer: keras.Optimizer, **computed: Any) -> Any:
    """Returns a rule whose other coefficients are attributes of the optimizer."""
    names = set(rule.__match_args__) - computed.keys()
    return rule(**computed, **{name: getattr(optimizer, name) for name in names})


def number_of_update(optimizer: keras.Optimizer, dtype: str = "float32") -> Tensor:
    """Returns the number of this update, from 1, a scalar tensor."""
    return backend.scalar(updates_of(optimizer), dtype) + 1


def fitting_rule(
    optimizer: keras.Optimizer, variables: Sequence[keras.Variable]
) -> type[Rule] | None:
    """Returns the rule that reproduces the optimizer's update of these variables."""
    # Without accumulation and averaging. None for an unknown class, or a constraint.
    rule = registered_rule(optimizer)
    clips = [optimizer.clipnorm, optimizer.clipvalue, optimizer.global_clipnorm]
    fits = (
        rule is not None
        # Only the setters, not the constructor, let an optimizer have more limits.
        and sum(bool(limit) for limit in clips) <= 1
        and (issubclass(rule, KerasRule) or optimizer.weight_decay is None)
        and all(_is_plain(v) for v in variables)
    )
    return rule if fits else None


def steps_by_rule(optimizer: keras.Optimizer) -> bool:
    """Whether a rule can update all variables of a built optimizer."""
    variables = variables_of(optimizer)
    are_float32 = all(v.dtype == "float32" for v in variables)
    return are_float32 and fitting_rule(optimizer, variables) is not None


def _is_plain(variable: Any) -> bool:
    """Whether a rule steps a variable; Keras also takes a bare `tf.Variable`."""
    return (
        isinstance(variable, keras.Variable)
        and variable.constraint is None
        and not is_overwritten(variable)
    )


def optimizer_signature(optimizer: keras.Optimizer) -> tuple[Any, ...]:
    """Returns the facts, not coefficients, that decide by which step it updates."""
    state = vars(optimizer)
    return (
        registered_rule(optimizer),
        bool(optimizer.clipnorm),
        bool(optimizer.clipvalue),
        bool(optimizer.global_clipnorm),
        bool(optimizer.use_ema),
        optimizer.gradient_accumulation_steps,
        optimizer.weight_decay is None,
        frozenset(state.get("_exclude_from_weight_decay") or ()),
        state.get("_exclude_from_weight_decay_pattern"),
    )


# --- Keras's optimizers -------------------------------------------------------------


@dataclass(frozen=True)
class KerasRule(Rule):
    """A formula of Keras's, with its decoupled decay.

    `decay` is the `weight_decay` of Keras's optimizers times the learning rate; None
    if there is none. A variable is in the group True if it decays.
    """

    decay: Any = field(default=None, kw_only=True)

    def decayed(self, w: Tensor) -> Tensor:
        """Returns a variable after its decoupled decay, which comes before the step."""
        return w if self.decay is None else w - w * self.decay

    @classmethod
    def computed(cls, optimizer: keras.Optimizer, learning_rate: Tensor) -> dict:
        """Returns the fields that are not attributes of the optimizer, a dict."""
        return {"learning_rate": learning_rate}

    @classmethod
    def of_groups(cls, optimizer: keras.Optimizer, learning_rate: Tensor) -> dict:
        rule = from_attributes(cls, optimizer, **cls.computed(optimizer, learning_rate))
        if optimizer.weight_decay is None:
            return {False: rule}
        decay = learning_rate * optimizer.weight_decay
        return {False: rule, True: replace(rule, decay=decay)}

    @classmethod
    def groups_of(cls, optimizer: keras.Optimizer, indices: Sequence[int]) -> list[Any]:
        if optimizer.weight_decay is None:
            return [False] * len(indices)
        variables = variables_of(optimizer)
        return [uses_weight_decay(optimizer, variables[i]) for i in indices]


@rule_of(keras.optimizers.SGD)
@dataclass(frozen=True)
class SGD(KerasRule):
    """Gradient descent, as in `keras.optimizers.SGD`: `w = w - learning_rate * g`."""

    kernel: ClassVar = "sgd"
    squares: ClassVar = False
    learning_rate: Any

    @classmethod
    def is_rule_of(cls, optimizer: keras.Optimizer) -> bool:
        return optimizer.momentum == 0

    def __call__(self, xp, select, g, w, norms=None):
        return (select(self.decayed(w) - g * self.learning_rate, w),)


@rule_of(keras.optimizers.SGD)
@dataclass(frozen=True)
class Momentum(KerasRule):
    """Gradient descent with momentum, as in `keras.optimizers.SGD`."""

    kernel: ClassVar = "momentum"
    squares: ClassVar = False
    slots: ClassVar = {"momentum": "momentums"}
    learning_rate: Any
    momentum: Any
    nesterov: bool = False

    @classmethod
    def is_rule_of(cls, optimizer: keras.Optimizer) -> bool:
        return optimizer.momentum != 0

    def __call__(self, xp, select, g, w, m, norms=None):
        descent = g * self.learning_rate
        m = select(m * self.momentum - descent, m)
        step = m * self.momentum - descent if self.nesterov else m
        return select(self.decayed(w) + step, w), m


@rule_of(keras.optimizers.Adam, keras.optimizers.AdamW)
@dataclass(frozen=True)
class Adam(KerasRule):
    """Adam, as in `keras.optimizers.Adam`, and with `decay` as in `AdamW`."""

    kernel: ClassVar = "adam"
    slots: ClassVar = {"momentum": "_momentums", "velocity": "_velocities"}
    alpha: Any
    beta_1: Any
    beta_2: Any
    epsilon: Any

    @classmethod
    def is_rule_of(cls, optimizer: keras.Optimizer) -> bool:
        return not optimizer.amsgrad

    @classmethod
    def computed(cls, optimizer: keras.Optimizer, learning_rate: Tensor) -> dict:
        betas = optimizer.beta_1, optimizer.beta_2
        return {"alpha": cls.alpha_of(optimizer, learning_rate, *betas)}

    @staticmethod
    def alpha_of(optimizer: Any, rate: Tensor, beta_1: Any, beta_2: Any) -> Tensor:
        """Returns a learning rate with the correction of moments that begin at 0."""
        step = number_of_update(optimizer)
        return rate * backend.xp.sqrt(1 - beta_2**step) / (1 - beta_1**step)

    def __call__(self, xp, select, g, w, m, v, norms=None):
        m = select(xp.average(m, g, self.beta_1), m)
        v = select(xp.average(v, xp.square(g), self.beta_2), v)
        step = m * self.alpha / (xp.sqrt(v) + self.epsilon)
        return select(self.decayed(w) - step, w), m, v


@rule_of(keras.optimizers.Nadam)
@dataclass(frozen=True)
class Nadam(KerasRule):
    """Adam with Nesterov momentum, as in `keras.optimizers.Nadam`.

    `product` is that of the momenta of all updates, including this one.
    """

    slots: ClassVar = {"momentum": "_momentums", "velocity": "_velocities"}
    learning_rate: Any
    momentum: Any
    next_momentum: Any
    product: Any
    beta_2_power: Any
    beta_1: Any
    beta_2: Any
    epsilon: Any

    @classmethod
    def is_rule_of(cls, optimizer: keras.Optimizer) -> bool:
        # Keras gives the product the dtype of the first variable, and multiplies in it.
        product = getattr(optimizer, "_u_product", None)
        return product is None or product.dtype == "float32"

    @classmethod
    def computed(cls, optimizer: keras.Optimizer, learning_rate: Tensor) -> dict:
        step = number_of_update(optimizer)
        momentum, next_momentum = (
            optimizer.beta_1 * (1 - 0.5 * 0.96**number) for number in (step, step + 1)
        )
        # Keras has made the product a trainable variable.
        product = ops.stop_gradient(read(optimizer._u_product))
        return {
            "learning_rate": learning_rate,
            "momentum": momentum,
            "next_momentum": next_momentum,
            "product": product * momentum,
            "beta_2_power": optimizer.beta_2**step,
        }

    def finish(self, optimizer: keras.Optimizer, finite: Tensor) -> None:
        ones = backend.xp.ones_like(self.momentum)
        factor = backend.xp.where(finite, self.momentum, ones)
        optimizer._u_product.assign(read(optimizer._u_product) * factor)

    def __call__(self, xp, select, g, w, m, v, norms=None):
        # As in Keras. In float32 `1 - beta` is rounded.
        beta_1, beta_2 = (xp.cast(b, g.dtype) for b in (self.beta_1, self.beta_2))
        m = select(xp.average(m, g, beta_1), m)
        v = select(xp.average(v, xp.square(g), beta_2), v)
        ahead = m * self.next_momentum / (1 - self.product * self.next_momentum)
        direction = ahead + g * (1 - self.momentum) / (1 - self.product)
        root = xp.sqrt(v / (1 - self.beta_2_power))
        step = direction * self.learning_rate / (root + self.epsilon)
        return select(self.decayed(w) - step, w), m, v


@rule_of(keras.optimizers.Adamax)
@dataclass(frozen=True)
class Adamax(KerasRule):
    """Adam with the largest magnitude, as in `keras.optimizers.Adamax`."""

    squares: ClassVar = False
    slots: ClassVar = {"momentum": "_m", "largest": "_u"}
    learning_rate: Any
    beta_1_power: Any
    beta_1: Any
    beta_2: Any
    epsilon: Any

    @classmethod
    def computed(cls, optimizer: keras.Optimizer, learning_rate: Tensor) -> dict:
        power = optimizer.beta_1 ** number_of_update(optimizer)
        return {"learning_rate": learning_rate, "beta_1_power": power}

    def __call__(self, xp, select, g, w, m, u, norms=None):
        m = select(xp.average(m, g, self.beta_1), m)
        u = select(xp.maximum(u * self.beta_2, xp.abs(g)), u)
        divisor = (u + self.epsilon) * (1 - self.beta_1_power)
        return select(self.decayed(w) - m * self.learning_rate / divisor, w), m, u


@rule_of(keras.optimizers.Lion)
@dataclass(frozen=True)
class Lion(KerasRule):
    """Steps of one length, as in `keras.optimizers.Lion`."""

    squares: ClassVar = False
    slots: ClassVar = {"momentum": "_momentums"}
    learning_rate: Any
    beta_1: Any
    beta_2: Any

    def __call__(self, xp, select, g, w, m, norms=None):
        # In float32 `1 - beta` is rounded: the sign is Keras's to the last bit.
        beta_1, beta_2 = (xp.cast(b, g.dtype) for b in (self.beta_1, self.beta_2))
        direction = xp.sign(m * beta_1 + g * (1 - beta_1))
        m = select(m * beta_2 + g * (1 - beta_2), m)
        return select(self.decayed(w) - direction * self.learning_rate, w), m


@rule_of(keras.optimizers.RMSprop)
@dataclass(frozen=True)
class RMSprop(KerasRule):
    """RMSprop as in `keras.optimizers.RMSprop`, neither centered nor with momentum."""

    slots: ClassVar = {"velocity": "_velocities"}
    learning_rate: Any
    rho: Any
    epsilon: Any

    @classmethod
    def is_rule_of(cls, optimizer: keras.Optimizer) -> bool:
        return not (optimizer.momentum > 0 or optimizer.centered)

    def __call__(self, xp, select, g, w, v, norms=None):
        v = select(v * self.rho + xp.square(g) * (1 - self.rho), v)
        step = g * self.learning_rate / xp.sqrt(v + self.epsilon)
        return select(self.decayed(w) - step, w), v


@rule_of(keras.optimizers.Adagrad)
@dataclass(frozen=True)
class Adagrad(KerasRule):
    """Adagrad, as in `keras.optimizers.Adagrad`."""

    slots: ClassVar = {"accumulator": "_accumulators"}
    has_moments: ClassVar = False
    learning_rate: Any
    epsilon: Any

    def __call__(self, xp, select, g, w, v, norms=None):
        v = select(v + xp.square(g), v)
        step = g * self.learning_rate / xp.sqrt(v + self.epsilon)
        return select(self.decayed(w) - step, w), v


@rule_of(keras.optimizers.Lamb)
@dataclass(frozen=True)
class Lamb(LayerAdaptiveRule, KerasRule):
    """LAMB, as in `keras.optimizers.Lamb`, with norms after the decoupled decay."""

    slots: ClassVar = {"momentum": "_momentums", "velocity": "_velocities"}
    weight_decay: ClassVar = 0.0  # type: ignore[misc]
    trust_ratio: ClassVar = TrustRatio()  # type: ignore[misc]
    learning_rate: Any
    beta_1: Any
    beta_2: Any
    epsilon: Any
    beta_1_power: Any
    beta_2_power: Any

    @classmethod
    def computed(cls, optimizer: keras.Optimizer, learning_rate: Tensor) -> dict:
        step = number_of_update(optimizer)
        return {
            "learning_rate": learning_rate,
            "beta_1_power": optimizer.beta_1**step,
            "beta_2_power": optimizer.beta_2**step,
        }

    def measured(self, xp, g, w, m, v):
        """Returns the direction of the step, and the decayed variable."""
        return self.advance(xp, always, g, m, v)[-1], self.decayed(w)

    def advance(self, xp, select, g, m, v):
        """Returns the new moments, and the direction that goes with them."""
        m = select(m * self.beta_1 + g * (1 - self.beta_1), m)
        v = select(v * self.beta_2 + xp.square(g) * (1 - self.beta_2), v)
        root = xp.sqrt(v / (1 - self.beta_2_power))
        return m, v, m / (1 - self.beta_1_power) / (root + self.epsilon)

    def __call__(self, xp, select, g, w, m, v, norms=None):
        m, v, d = self.advance(xp, select, g, m, v)
        w_before, w = w, self.decayed(w)
        return select(w - d * self.rate(norms, d, w), w_before), m, v


@dataclass(frozen=True)
class Orthogonalised(KerasRule):
    """Muon's step of a matrix, as in `keras.optimizers.Muon`."""

    slots: ClassVar = {"momentum": "momentums"}
    mixes_matrices: ClassVar = True
    learning_rate: Any
    momentum: Any
    nesterov: bool
    ns_steps: int
    rms_rate: float | None
    zeropower_via_newtonschulz5: Callable[[Tensor, int], Tensor]

    def direction(self, d: Tensor) -> Tensor:
        """Returns the direction of the step of a matrix, from its momentum."""
        matrix = self.zeropower_via_newtonschulz5(d, self.ns_steps)
        if self.rms_rate is None:
            return matrix
        # Not Keras's `lr_adjust`, which copies the root to the device.
        return matrix * (math.sqrt(max(d.shape)) * self.rms_rate)

    def __call__(self, xp, select, g, w, m, norms=None):
        m = select(m + (g + m * (self.momentum - 1)), m)
        d = g + m * self.momentum if self.nesterov else m
        step = xp.each(self.direction, d) * self.learning_rate
        return select(self.decayed(w) - step, w), m


@rule_of(keras.optimizers.Muon)
@dataclass(frozen=True)
class Muon(KerasRule):
    """The two rules of `keras.optimizers.Muon`: `Orthogonalised` and `Adam`.

    A variable is in the group `(has_velocity, decays)`.
    """

    slots: ClassVar = {"momentum": "momentums", "velocity": "adam_velocities"}
    mixes_matrices: ClassVar = True

    @classmethod
    def is_rule_of(cls, optimizer: keras.Optimizer) -> bool:
        # Keras 3.12 has other formulas.
        return hasattr(optimizer, "rms_rate")

    @classmethod
    def of_groups(cls, optimizer: keras.Optimizer, learning_rate: Tensor) -> dict:
        beta_1, beta_2 = optimizer.adam_beta_1, optimizer.adam_beta_2
        rate = learning_rate * optimizer.adam_lr_ratio
        alpha = Adam.alpha_of(optimizer, rate, beta_1, beta_2)
        adam = Adam(alpha, beta_1, beta_2, optimizer.epsilon)
        muon = from_attributes(Orthogonalised, optimizer, learning_rate=learning_rate)
        rules = {}
        for has_velocity, rule, weight_decay in (
            (False, muon, optimizer.weight_decay),
            (True, adam, optimizer.adam_weight_decay),
        ):
            decay = None if weight_decay is None else learning_rate * weight_decay
            rules[has_velocity, False] = rule
            rules[has_velocity, True] = replace(rule, decay=decay)
        return rules

    @classmethod
    def groups_of(cls, optimizer: keras.Optimizer, indices: Sequence[int]) -> list[Any]:
        variables, velocities = variables_of(optimizer), optimizer.adam_velocities
        return [
            (velocities[i] is not None, uses_weight_decay(optimizer, variables[i]))
            for i in indices
        ]


# --- Weights and their moving averages ----------------------------------------------


@dataclass(frozen=True)
class Average(Rule):
    """The moving average `w` of a variable `g`, as with `use_ema=True`."""

    momentum: Any

    def __call__(self, xp, select, g, w, norms=None):
        return (select(w * self.momentum + g * (1 - self.momentum), w),)


@dataclass(frozen=True)
class Overwrite(Rule):
    """A variable `w` that becomes its average `g`: see `ema_overwrite_frequency`."""

    def __call__(self, xp, select, g, w, norms=None):
        return (select(g, w),)
