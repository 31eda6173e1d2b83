"""A step under `torch.compile`: one node of the graph, which is a function of tensors.

Dynamo does not follow the Python of a step. It finds a call of one function, which
AOTAutograd traces as `jax.jit` does, with tensors that have no values. In this function
a step takes the reference of each primitive (`Framework`), which reads nothing on the
host, and writes variables in a scope. Inductor makes a kernel of the update of each
variable; `operators.py` has what it would take long to compile.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import keras
import torch
from torch import Tensor

from keras_lso._backend.tensors import FunctionT, Grads, Storage, Variables
from keras_lso._backend.torch.measure import THREAD, tracing
from keras_lso._backend.torch.no_sync import NumbersOnDevice
from keras_lso._backend.torch.shards import any_sharded

# The arguments of `apply` after the variables.
_OPTIONS = "scaled", "update_scale", "axis_name"
# A number, or a text that a step may depend on.
_FACTS = bool, int, float, str


class UnlessTraced:
    """An attribute of a class, in place of which a traced step finds another."""

    def __init__(self, eager: Any, traced: Any):
        self._eager, self._traced = eager, traced
        self._is_bound = hasattr(eager, "__get__")

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # 0.2 microseconds, some fifteen times a step.
        value = self._traced if THREAD.is_traced else self._eager
        return value.__get__(instance, owner) if self._is_bound else value


class TracedStep:
    """What a graph calls in place of the methods of a built optimizer.

    Args:
        optimizer: The optimizer.
        trained: The variables that it was built for.
        owners: The objects whose numbers a step reads: if one of these changes, Dynamo
            compiles anew.
        storage_of: Returns the tensors of variables, or in a scope the variables.
    """

    def __init__(
        self,
        optimizer: Any,
        trained: Variables,
        owners: list[Any],
        storage_of: Callable[[Variables], list[Storage]],
    ):
        self._optimizer, self._trained = optimizer, trained
        self._storage_of = storage_of
        self._variables = [*trained, *optimizer.variables]
        # A callable that computes a rate may have no attributes.
        owners = [owner for owner in owners if hasattr(owner, "__dict__")]
        self._facts = [
            (owner, name)
            for owner in owners
            for name, value in vars(owner).items()
            if value is None or isinstance(value, _FACTS)
        ]
        self._with_rates = [o for o in owners if "_learning_rate" in vars(o)]
        scalings = (vars(o)["_scaling"] for o in owners if "_scaling" in vars(o))
        self._scaling: Any = next(scalings, None)
        self._step_node = torch._dynamo.nonstrict_trace(self._step)
        self._unscale_node = torch._dynamo.nonstrict_trace(self._unscale)

    # --- What Dynamo follows ----------------------------------------------------------

    def apply(
        self,
        grads: Grads,
        trainable_variables: Variables | None = None,
        *args: Any,
        **options: Any,
    ) -> None:
        """Takes a step."""
        positions = list(range(len(self._trained)))
        if trainable_variables is not None:
            positions = self._positions_of(trainable_variables)
        options = dict(zip(_OPTIONS, args, strict=False)) | options
        # A node takes no None.
        options = {k: v for k, v in options.items() if v is not None}
        has_grad = [g is not None for g in grads]
        present = [g for g in grads if g is not None]
        # `scale_loss` in the same graph sets its mark when the graph runs.
        if self._scaling is not None and "scaled" not in options:
            options["scaled"] = not self._scaling.are_unscaled
        storage, old = self._values()
        with torch.no_grad():
            new = self._step_node(
                old, present, positions, has_grad, options, self._signature()
            )
            if storage is old:
                torch._foreach_copy_(old, new)
            else:
                for variable, value in zip(storage, new, strict=True):
                    variable.assign(value)

    def get_unscaled_gradients(self, grads: Grads) -> Grads:
        """Divides gradients by the loss scale."""
        grads = list(grads)
        present = [g for g in grads if g is not None]
        _, values = self._values()
        unscaled = iter(self._unscale_node(values, present))
        self._scaling.are_unscaled = True
        return [None if g is None else next(unscaled) for g in grads]

    def _values(self) -> tuple[list[Storage], list[Tensor]]:
        """Returns the storage of the variables, and their values."""
        # Dynamo follows `variable.value` and `variable.assign` for 10 ms a variable.
        storage = self._storage_of(self._variables)
        if torch.is_tensor(storage[0]):
            return storage, storage
        return storage, [v.value for v in storage]

    def _signature(self) -> list:
        """Returns what a step reads from Python, which Dynamo guards by."""
        facts = [vars(owner).get(name) for owner, name in self._facts]
        rates = [id(vars(owner)["_learning_rate"]) for owner in self._with_rates]
        return ["None" if fact is None else fact for fact in facts] + rates

    def _positions_of(self, variables: Variables) -> list[int]:
        """Returns the positions of variables among those that are trained."""
        positions, count = [], len(self._trained)
        place = -1
        for variable in variables:
            # In their order, each is the next.
            for _ in range(count):
                place = (place + 1) % count
                if self._trained[place] is variable:
                    break
            else:
                raise ValueError("A variable that the optimizer was not built for")
            positions.append(place)
        return positions

    # --- The nodes --------------------------------------------------------------------

    def _scope(self, values: list[Tensor]) -> keras.StatelessScope:
        """Returns a scope in which the variables have these values."""
        mapping = list(zip(self._variables, values, strict=True))
        return keras.StatelessScope(state_mapping=mapping)

    def _unscale(self, values: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """Returns gradients divided by the loss scale."""
        with tracing(), self._scope(values):
            return self._scaling.unscaled(grads)

    def _step(
        self,
        values: list[Tensor],
        grads: list[Tensor],
        positions: list[int],
        has_grad: list[bool],
        options: dict[str, Any],
        signature: list,
    ) -> list[Tensor]:
        """Returns the values of the variables after a step."""
        present = iter(grads)
        paired = [next(present) if has else None for has in has_grad]
        variables = [self._trained[i] for i in positions]
        scope = self._scope(values)
        with tracing(), torch.no_grad(), NumbersOnDevice(), scope:
            self._optimizer.apply(paired, variables, **options)
        if len(scope.state_mapping) > len(self._variables):
            raise RuntimeError(
                "Under `torch.compile` a step may write only the variables that it "
                "trains and those in `optimizer.variables`. Create the others by "
                "`optimizer.add_variable` before the optimizer is built, or leave the "
                f"step out of what is compiled. Received: {self._optimizer!r}"
            )
        return [scope.get_current_value(v) for v in self._variables]


def traced_step(
    optimizer: Any,
    trained: Variables,
    owners: list[Any],
    storage_of: Callable[[Variables], list[Storage]],
) -> TracedStep | None:
    """See `Framework.traced_step`. Shards have operators of their own."""
    if any_sharded(storage_of(trained)):
        return None
    return TracedStep(optimizer, trained, owners, storage_of)


def in_graphs(method: FunctionT) -> FunctionT:
    """See `Framework.in_graphs`."""
    outside_of_graphs = torch.compiler.disable(method)
    name = method.__name__

    @functools.wraps(method)
    def eager_or_traced(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        is_traced = torch.compiler.is_dynamo_compiling()
        if is_traced and vars(optimizer).get("_traced_step") is not None:
            return getattr(optimizer._traced_step, name)(*args, **kwargs)
        # Also where Dynamo has given up on the caller: it would compile callees.
        return outside_of_graphs(optimizer, *args, **kwargs)

    return cast(FunctionT, eager_or_traced)
