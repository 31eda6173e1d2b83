"""The state of a `LossScaleOptimizer`: its variables, counters and files."""

import warnings

import keras
import numpy as np
from keras import ops

from keras_lso import adapters, loss_scales
from keras_lso._checks import check_positive_int, check_state
from keras_lso._stored_state import read_stored
from keras_lso._tf_keras_methods import TFKerasMethods
from keras_lso._variable_list import VariableList


class OptimizerState(TFKerasMethods):
    """What a `LossScaleOptimizer` counts, keeps, saves and loads.

    Its variables, in order:

    - `iteration`: the attempted steps (the inner optimizer counts the applied
      ones), and `learning_rate`, which has no use;
    - `step_counter` and `dynamic_scale`, of the loss-scale policy;
    - those of the inner optimizer;
    - what else the policy keeps, and the float32 master weights, if any;
    - `amax_since_update`, for a policy that asks for it, which is not saved: the
      largest magnitude among the gradients since the scale was last updated;
    - `consecutive_skips`, which is not saved either: how many steps in a row were
      skipped, how many of those at the lowest scale, and how many since the scale
      was last updated.

    Up to the inner optimizer's this is the layout of Keras's own class, so that
    files go both ways. All but the inner optimizer's slots and the masters are there
    before `build`.
    """

    built: bool

    def _make_counters(self):
        self._unsaved_variables = []
        if self.loss_scale_policy.needs_amax:
            self._amax_since_update = self._add_counter("amax_since_update", "float32")
        self._consecutive_skips = self._add_counter("consecutive_skips", "int", (3,))

    def _add_counter(self, name, dtype, shape=()):
        counter = self.add_variable(
            shape=shape,
            dtype=dtype,
            initializer="zeros",
            aggregation="only_first_replica",
            name=name,
        )
        self._unsaved_variables.append(counter)
        return counter

    def _count_step(self, finite, update_scale):
        """Counts an attempted step; to be called before the scale moves.

        Returns:
            Whether all steps since the scale was last updated were finite: a loss
            that was applied with `update_scale=False` counts as well.
        """
        attempted = self._attempted_steps
        attempted.assign(ops.convert_to_tensor(attempted) + 1)
        skips = ops.convert_to_tensor(self._consecutive_skips)
        in_a_row, at_lowest, since_update = skips[0], skips[1], skips[2]
        policy = self.loss_scale_policy
        skipped = ops.cast(ops.logical_not(finite), skips.dtype)
        is_lowest = ops.cast(policy.value <= policy.min_scale, skips.dtype)
        since_update = since_update + skipped
        skips = [
            skipped * (in_a_row + 1),
            skipped * is_lowest * (at_lowest + 1),
            since_update * (0 if update_scale else 1),
        ]
        # Keras assigns all that is no scalar by this method, which may be overridden.
        self.inner_optimizer.assign(self._consecutive_skips, ops.stack(skips))
        return since_update == 0

    def _count_amax(self, amax, update_scale):
        """Returns the largest magnitude since the scale was last updated."""
        amax = ops.maximum(amax, ops.convert_to_tensor(self._amax_since_update))
        self._amax_since_update.assign(ops.zeros_like(amax) if update_scale else amax)
        return amax

    # --- What a user asks ---------------------------------------------------

    @property
    def dynamic(self):
        """Whether the loss scale adapts itself."""
        return not isinstance(self.loss_scale_policy, loss_scales.FixedLossScale)

    @property
    def initial_scale(self):
        """The loss scale of the first step, a float."""
        return self.loss_scale_policy.initial_loss_scale

    @property
    def dynamic_growth_steps(self):
        """Number of finite steps after which the scale grows; None if fixed."""
        return getattr(self.loss_scale_policy, "increment_period", None)

    @property
    def dynamic_counter(self):
        """Number of finite steps since the scale last moved; None if fixed."""
        return ops.copy(self.loss_scale_policy.step_counter) if self.dynamic else None

    @property
    def step_counter(self):
        """The variable behind `dynamic_counter`."""
        return self.loss_scale_policy.step_counter

    @property
    def dynamic_scale(self):
        """The variable behind `loss_scale`."""
        return self.loss_scale_policy.scale

    @property
    def skipped_steps(self):
        """The number of steps that were skipped, an integer scalar tensor."""
        applied = adapters.iteration_variable(self.inner_optimizer)
        return ops.subtract(self._attempted_steps, applied)

    @property
    def last_step_applied(self):
        """Whether the last step was applied, a boolean scalar tensor.

        True before the first one.
        """
        return ops.equal(ops.convert_to_tensor(self._consecutive_skips)[0], 0)

    def check_stalled(self, patience=50):
        """Raises an error if training has come to a standstill.

        When even the lowest scale overflows, step after step, the model itself
        has diverged, and no loss scale can help it. This reads one number from
        the device: call it every now and then, not at every step.

        Args:
            patience: Int. Number of steps in a row, all skipped at the lowest
                scale, from which on training has stalled. Defaults to `50`.

        Raises:
            FloatingPointError: If that many steps were skipped.
        """
        patience = check_positive_int("patience", patience)
        skips = self._count_skips_at_lowest()
        if skips >= patience:
            raise FloatingPointError(
                f"The last {skips} steps were all skipped, at the lowest loss scale "
                f"there is ({self.loss_scale_policy.min_scale}): the gradients are "
                "inf or NaN at any scale, so the model itself has diverged. Go back "
                "to a checkpoint and lower the learning rate or clip the gradients "
                "(`global_clipnorm` of the inner optimizer)."
            )

    def _count_skips_at_lowest(self):
        """Returns how many steps in a row were skipped at the lowest scale, an int."""
        return int(ops.convert_to_numpy(self._consecutive_skips)[1])

    # --- Variables ----------------------------------------------------------

    @property
    def _attempted_steps(self):
        return adapters.iteration_variable(self)

    @property
    def variables(self):
        """All variables of this optimizer and of the inner one.

        A list; called, `variables()`, it gives those that tf.keras's method gave.
        """
        return VariableList(
            [*self._saved_variables, *self._unsaved_variables],
            called=self._called_variables,
        )

    @property
    def _own_variables(self):
        """Those that Keras's class has as well."""
        return adapters.base_variables(self) + self.loss_scale_policy.variables[:2]

    @property
    def _saved_variables(self):
        return [
            *self._own_variables,
            *self.inner_optimizer.variables,
            *self.loss_scale_policy.variables[2:],
            *(self._masters.variables if self.built else []),
        ]

    # --- Files --------------------------------------------------------------

    def save_own_variables(self, store):
        """Writes the state into `store`, in the layout of Keras's own class."""
        for i, variable in enumerate(self._saved_variables):
            # Not by `numpy()`, which under OpenVINO reads constants only in Keras 3.12.
            store[str(i)] = np.array(ops.convert_to_numpy(variable))
        self._hides_inner_optimizer = False

    def load_own_variables(self, store):
        """Reads the state from `store`.

        Three layouts are known: our own, that of
        `keras.optimizers.LossScaleOptimizer`, and that of the bare inner
        optimizer, after which the scale starts afresh.
        """
        self._hides_inner_optimizer = True
        variables = self._variables_in(store)
        if variables is None:
            # What Keras does: a model may be loaded without its optimizer.
            hint = self._hint_at_other_layouts()
            warnings.warn(
                f"Skipping variable loading for optimizer '{self.name}', because it "
                f"has {len(self._saved_variables)} variables whereas the saved "
                f"optimizer has {len(store.keys())} variables.{hint}",
                stacklevel=2,
            )
            return
        mended = self.loss_scale_policy.variables
        self._assign_all(variables, read_stored(variables, store, mended))
        adapters.restore_unsaved(self.inner_optimizer, variables)

    def _variables_in(self, store):
        """Returns the variables whose values are stored; None for another layout."""
        own, inner = self._own_variables, self.inner_optimizer
        layouts = [
            self._saved_variables,
            own + inner.variables,
            own + adapters.saved_by_keras(inner),
            inner.variables,
        ]
        if not self.built:
            # Keras's class makes the scale's variables in `build`, as ours once did.
            layouts.append(adapters.base_variables(self) + inner.variables)
        layouts = [v for v in layouts if len(v) == len(store.keys())]
        # Two may be of one length: around Adafactor Keras's class saves fewer of the
        # inner optimizer's variables, and as many more of its own.
        variables = max(layouts, key=lambda v: _count_fitting(v, store), default=None)
        # Before `build` a wrapper has so few that other files may have as many.
        if variables is None or self.built:
            return variables
        return variables if _count_fitting(variables, store) == len(variables) else None

    def _hint_at_other_layouts(self):
        if not self.built:
            return " The optimizer has not been built yet."
        if any(v.dtype == "float16" for v in adapters.trainable_variables(self)):
            return (
                " The weights are float16: an optimizer with float32 masters of them "
                "(`master_weights`) and one without have not the same state."
            )
        return ""

    def _weight_layouts(self):
        """The loss scale is in all but the first; it stays as it is there."""
        return [self.weights, self._saved_variables, list(self.variables)]

    def _assign_weights(self, variables, values):
        saved = self._saved_variables
        if len(variables) >= len(saved):
            self._assign_all(saved, values[: len(saved)])
            return
        skipped = ops.copy(self.skipped_steps)
        super()._assign_weights(variables, values)
        applied = adapters.iteration_variable(self.inner_optimizer)
        self._attempted_steps.assign(ops.add(applied, skipped))

    def _assign_all(self, variables, values):
        values = [
            check_state(v, value) for v, value in zip(variables, values, strict=True)
        ]
        # What the file does not hold starts afresh.
        self._attempted_steps.assign(0)
        self.loss_scale_policy.reset()
        for variable in self._unsaved_variables:
            variable.assign(ops.zeros(variable.shape, variable.dtype))
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        self.loss_scale_policy.restore()
        # Keras's class leaves the count of attempted steps at 0.
        applied = int(adapters.iteration_variable(self.inner_optimizer).numpy())
        if int(self._attempted_steps.numpy()) < applied:
            self._attempted_steps.assign(applied)

    def __dir__(self):
        """Keras finds what to save and load inside an object by its `dir()`.

        Keras's own class saves the inner optimizer a second time that way, and
        so do we, for its sake. When loading, ours is complete already: a second
        reading could only undo it, or warn about a copy that is not there.
        """
        hidden = vars(self).get("_hides_inner_optimizer", False)
        return [n for n in super().__dir__() if not (hidden and n == "inner_optimizer")]


def _count_fitting(variables, store):
    """Returns for how many of the variables there is an entry of their kind."""
    names = set(store.keys())
    return sum(
        str(i) in names and _fits(variable, store[str(i)])
        for i, variable in enumerate(variables)
    )


def _fits(variable, stored):
    """Whether what is stored has the variable's shape, and counts if that does."""
    if not hasattr(stored, "dtype"):
        stored = np.asarray(stored)
    is_count = "int" in keras.backend.standardize_dtype(variable.dtype)
    has_shape = stored.shape == tuple(variable.shape)
    return has_shape and (stored.dtype.kind in "iu") == is_count
