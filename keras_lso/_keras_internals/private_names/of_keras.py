"""The private attributes of Keras that the package relies on, each with its probe.

A test compares the list with the package's source. Every attribute that is used must be
in the list, and the reverse.
"""

from keras_lso._keras_internals.private_names.probes import (
    Probe,
    module,
    says,
    sets,
    takes,
)

_OPTIMIZER = "keras.optimizers.Optimizer"
_VARIABLE = "keras.Variable"
_LAYER = "keras.layers.Layer"

_STATE_OF_AN_OPTIMIZER = (
    Probe(_OPTIMIZER, "_iterations", sets),
    Probe(_OPTIMIZER, "_learning_rate", sets),
    Probe(_OPTIMIZER, "_variables", sets),
    Probe(_OPTIMIZER, "_trainable_variables", sets),
    Probe(_OPTIMIZER, "_trainable_variables_indices", sets),
    Probe(_OPTIMIZER, "_accumulated_gradients", sets),
    Probe(_OPTIMIZER, "_model_variables_moving_average", sets),
    Probe(_OPTIMIZER, "_exclude_from_weight_decay", sets),
    Probe(_OPTIMIZER, "_exclude_from_weight_decay_pattern", sets),
    Probe(_OPTIMIZER, "_distribution_strategy", sets, "tensorflow"),
    # The names of the variables that `build` makes.
    Probe(_OPTIMIZER, "build", says("gradient_accumulator")),
    Probe(_OPTIMIZER, "build", says("average")),
)

_METHODS_OF_AN_OPTIMIZER = (
    Probe(
        _OPTIMIZER,
        "_backend_update_step",
        takes("grads", "trainable_variables", "learning_rate"),
    ),
    Probe(_OPTIMIZER, "_filter_empty_gradients", takes("grads", "variables")),
    Probe(_OPTIMIZER, "_get_variable_index", takes("variable")),
    Probe(_OPTIMIZER, "_track_variable", takes("variable")),
    Probe(_OPTIMIZER, "_use_weight_decay", takes("variable")),
    Probe(_OPTIMIZER, "_var_key", takes("variable")),
    Probe(
        "keras.src.backend.torch.optimizers.torch_sgd.SGD",
        "_parallel_update_step",
        backend="torch",
    ),
    Probe(
        _OPTIMIZER, "_all_reduce_sum_gradients", takes("grads_and_vars"), "tensorflow"
    ),
)


def _sets_in(cls):
    """Returns a check for an attribute of a class that an older Keras lacks."""

    def found(optimizers, name):
        return not hasattr(optimizers, cls) or sets(getattr(optimizers, cls), name)

    return found


def _slots(cls, names):
    return tuple(Probe(f"keras.optimizers.{cls}", name, sets) for name in names.split())


_SLOTS_OF_OPTIMIZERS = (
    *_slots("SGD", "momentums"),
    *_slots("Adam", "_momentums _velocities _velocity_hats"),
    *_slots("Nadam", "_momentums _velocities _u_product"),
    *_slots("Adamax", "_m _u"),
    *_slots("Lion", "_momentums"),
    *_slots("RMSprop", "_velocities _momentums _average_gradients"),
    *_slots("Adagrad", "_accumulators"),
    *_slots("Adadelta", "_accumulated_grads _accumulated_delta_vars"),
    *_slots("Ftrl", "_accumulators _linears"),
    Probe("keras.optimizers", "_momentums", _sets_in("ScheduleFreeAdamW")),
)

_VARIABLES_AND_LAYERS = (
    Probe(_VARIABLE, "_value", sets),
    Probe(_VARIABLE, "_path", sets),
    Probe(_VARIABLE, "_constraint", sets),
    Probe(_VARIABLE, "_overwrite_with_gradient", sets),
    Probe(_VARIABLE, "_layout", sets, "jax"),
    Probe(_VARIABLE, "_autocast", sets),
    Probe(_LAYER, "_flatten_layers", takes()),
    Probe(_LAYER, "_trainable_variables", sets),
    Probe(_LAYER, "_non_trainable_variables", sets),
    Probe(_LAYER, "_dtype_policy", sets),
    Probe("keras.layers.Lambda", "_output_shape", sets),
    Probe(_LAYER, "_torch_params", sets, "torch"),
)

_OF_MODELS = (
    Probe("keras.Operation", "_inbound_nodes", sets),
    Probe("keras.Model", "_compile_config", sets),
    Probe("keras.Model", "_symbolic_build"),
)

_MODULES = (
    Probe("keras.src.backend.common", "AutocastScope"),
    Probe("keras.src.models.functional", "Functional"),
    Probe("keras.src.models.functional", "functional_like_constructor"),
    Probe("keras.src.backend.common.stateless_scope", "in_stateless_scope"),
    Probe("keras.src.backend.common", "global_state", module),
    Probe("keras.src.saving.serialization_lib", "SafeModeScope"),
    Probe("keras.src.tree.tree_api", "register_tree_node_class"),
    Probe("keras.src.utils.naming", "to_snake_case"),
    # The private classes that replace Keras's public ones.
    Probe("keras.src.backend.torch", "optimizers", module, "torch"),
)

PROBES = (
    *_STATE_OF_AN_OPTIMIZER,
    *_METHODS_OF_AN_OPTIMIZER,
    *_SLOTS_OF_OPTIMIZERS,
    *_VARIABLES_AND_LAYERS,
    *_OF_MODELS,
    *_MODULES,
)
