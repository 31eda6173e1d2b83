"""The private attributes of Keras that the package leans on, each with its probe.

A test compares the list with the package's source: what is used stands here, and what
stands here is used.
"""

from keras_lso._private_names.probes import Probe, module, says, sets, takes

_OPTIMIZER = "keras.optimizers.Optimizer"
_VARIABLE = "keras.Variable"
_LAYER = "keras.layers.Layer"
_IN = "_keras_internals/"
_OPTIMIZERS = f"{_IN}optimizers.py"
_RULES = f"{_IN}rules.py"
_RATES = f"{_IN}rates.py"
_SLOTS = f"{_IN}slots.py"
_VARIABLES = f"{_IN}variables.py"
_LAYERS = f"{_IN}layers.py"
_SEEDS = f"{_IN}seeds.py"
_MODELS = f"{_IN}models.py"
_CHECKPOINTS = "_tf_keras/checkpoints.py"

_STATE_OF_AN_OPTIMIZER = (
    Probe(_OPTIMIZER, "_iterations", f"{_OPTIMIZERS} {_RATES} {_CHECKPOINTS}", sets),
    Probe(
        _OPTIMIZER,
        "_learning_rate",
        f"{_OPTIMIZERS} {_RATES} {_SLOTS} {_CHECKPOINTS}",
        sets,
    ),
    Probe(_OPTIMIZER, "_variables", f"{_OPTIMIZERS} {_CHECKPOINTS}", sets),
    Probe(
        _OPTIMIZER,
        "_trainable_variables",
        f"{_OPTIMIZERS} {_SLOTS} {_CHECKPOINTS} {_IN}rule_optimizer.py",
        sets,
    ),
    Probe(_OPTIMIZER, "_trainable_variables_indices", _OPTIMIZERS, sets),
    Probe(_OPTIMIZER, "_accumulated_gradients", _OPTIMIZERS, sets),
    Probe(_OPTIMIZER, "_model_variables_moving_average", _OPTIMIZERS, sets),
    Probe(_OPTIMIZER, "_exclude_from_weight_decay", f"{_OPTIMIZERS} {_RULES}", sets),
    Probe(
        _OPTIMIZER,
        "_exclude_from_weight_decay_pattern",
        f"{_OPTIMIZERS} {_RULES}",
        sets,
    ),
    Probe(_OPTIMIZER, "_distribution_strategy", _OPTIMIZERS, sets, "tensorflow"),
    # The names of the variables that `build` makes.
    Probe(_OPTIMIZER, "build", "_tf_keras/state.py", says("gradient_accumulator")),
    Probe(_OPTIMIZER, "build", "_tf_keras/state.py", says("average")),
)

_METHODS_OF_AN_OPTIMIZER = (
    Probe(
        _OPTIMIZER,
        "_backend_update_step",
        f"{_IN}rule_optimizer.py",
        takes("grads", "trainable_variables", "learning_rate"),
    ),
    Probe(
        _OPTIMIZER,
        "_filter_empty_gradients",
        _OPTIMIZERS,
        takes("grads", "variables"),
    ),
    Probe(
        _OPTIMIZER,
        "_get_variable_index",
        f"{_OPTIMIZERS} {_IN}rule_optimizer.py",
        takes("variable"),
    ),
    Probe(_OPTIMIZER, "_track_variable", _OPTIMIZERS, takes("variable")),
    Probe(
        _OPTIMIZER,
        "_use_weight_decay",
        f"{_OPTIMIZERS} {_IN}rule_optimizer.py",
        takes("variable"),
    ),
    Probe(_OPTIMIZER, "_var_key", _OPTIMIZERS, takes("variable")),
    Probe(
        "keras.src.backend.torch.optimizers.torch_sgd.SGD",
        "_parallel_update_step",
        _OPTIMIZERS,
        backend="torch",
    ),
    Probe(
        _OPTIMIZER,
        "_all_reduce_sum_gradients",
        f"{_IN}distribution.py",
        takes("grads_and_vars"),
        "tensorflow",
    ),
)


def _slots(cls, names, used_in=f"{_RULES} {_SLOTS}"):
    return tuple(
        Probe(f"keras.optimizers.{cls}", name, used_in, sets) for name in names.split()
    )


_SLOTS_OF_OPTIMIZERS = (
    *_slots("SGD", "momentums"),
    *_slots("Adam", "_momentums _velocities"),
    *_slots("Adam", "_velocity_hats", _SLOTS),
    *_slots("Nadam", "_momentums _velocities"),
    *_slots("Nadam", "_u_product", f"{_RULES} {_SLOTS} {_IN}unsaved.py {_CHECKPOINTS}"),
    *_slots("Adamax", "_m _u"),
    *_slots("Lion", "_momentums"),
    *_slots("RMSprop", "_velocities"),
    *_slots("RMSprop", "_momentums _average_gradients", _SLOTS),
    *_slots("Adagrad", "_accumulators"),
    *_slots("Adadelta", "_accumulated_grads _accumulated_delta_vars", _SLOTS),
    *_slots("Ftrl", "_accumulators _linears", _SLOTS),
)

_VARIABLES_AND_LAYERS = (
    Probe(_VARIABLE, "_value", f"{_IN}distribution.py {_VARIABLES}", sets),
    Probe(_VARIABLE, "_path", _VARIABLES, sets),
    Probe(_VARIABLE, "_constraint", _VARIABLES, sets),
    Probe(_VARIABLE, "_overwrite_with_gradient", _VARIABLES, sets),
    Probe(_VARIABLE, "_layout", _VARIABLES, sets, "jax"),
    Probe(_VARIABLE, "_autocast", _LAYERS, sets),
    Probe(_LAYER, "_flatten_layers", f"{_LAYERS} {_VARIABLES}", takes()),
    Probe(_LAYER, "_trainable_variables", _LAYERS, sets),
    Probe(_LAYER, "_non_trainable_variables", f"{_LAYERS} {_MODELS}", sets),
    Probe(_LAYER, "_dtype_policy", _LAYERS, sets),
    Probe("keras.layers.Lambda", "_output_shape", _LAYERS, sets),
    Probe(
        _LAYER,
        "_torch_params",
        "_backend/_torch_shard_checks.py",
        sets,
        "torch",
    ),
)

_OF_MODELS = (
    Probe("keras.Operation", "_inbound_nodes", _LAYERS, sets),
    Probe("keras.Model", "_compile_config", _LAYERS, sets),
    Probe("keras.Model", "_symbolic_build", _MODELS),
)

_MODULES = (
    Probe("keras.src.backend", "AutocastScope", _LAYERS),
    Probe("keras.src.models.functional", "Functional", _LAYERS),
    Probe("keras.src.models.functional", "functional_like_constructor", _LAYERS),
    Probe("keras.src.backend.common.stateless_scope", "in_stateless_scope", _VARIABLES),
    Probe("keras.src.backend.common", "global_state", _SEEDS, module),
    Probe("keras.src.saving.serialization_lib", "SafeModeScope", _LAYERS),
    Probe("keras.src.tree.tree_api", "register_tree_node_class", _VARIABLES),
    Probe("keras.src.utils.naming", "to_snake_case", _OPTIMIZERS),
    # The classes that Keras puts in place of its own.
    Probe("keras.src.backend.torch", "optimizers", _OPTIMIZERS, module, "torch"),
)

PROBES = (
    *_STATE_OF_AN_OPTIMIZER,
    *_METHODS_OF_AN_OPTIMIZER,
    *_SLOTS_OF_OPTIMIZERS,
    *_VARIABLES_AND_LAYERS,
    *_OF_MODELS,
    *_MODULES,
)
