"""What this package knows of Keras's own optimizers and variables.

The only place that touches Keras's private attributes. Everything that another
version of Keras might spell differently stands here.
"""

from keras_lso.adapters.optimizers import (
    add_variable,
    as_accumulated,
    averages,
    base_variables,
    canonical_class,
    chain,
    check_known,
    check_takes_shards,
    config_of,
    count_by,
    exclude_twins_from_weight_decay,
    index_of,
    is_known,
    iteration_variable,
    keeps_averages,
    members,
    name_of,
    public_config,
    remember_trainable_variables,
    schedule_of,
    track_variable,
    trainable_variables,
    uses_weight_decay,
    warn_of_missing,
    where_variables_are_made,
)
from keras_lso.adapters.replicas import (
    has_reduced_gradients,
    reduced_gradients,
)
from keras_lso.adapters.rules import (
    RuleOptimizer,
    fused_step_of,
    make_rules,
    rate_of,
    rule_of,
)
from keras_lso.adapters.shards import (
    check_shards,
    sharded_slots,
)
from keras_lso.adapters.slots import (
    slots,
    weights,
)
from keras_lso.adapters.unsaved import (
    nadam_product,
    restore_unsaved,
    saved_by_keras,
)
from keras_lso.adapters.variables import (
    flat_path,
    is_overwritten,
    layers_of,
    path_matches,
    path_of,
    register_tree_node,
    storage,
    twin,
)

__all__ = [
    "RuleOptimizer",
    "add_variable",
    "as_accumulated",
    "averages",
    "base_variables",
    "canonical_class",
    "chain",
    "check_known",
    "check_shards",
    "check_takes_shards",
    "config_of",
    "count_by",
    "exclude_twins_from_weight_decay",
    "flat_path",
    "fused_step_of",
    "has_reduced_gradients",
    "index_of",
    "is_known",
    "is_overwritten",
    "iteration_variable",
    "keeps_averages",
    "layers_of",
    "make_rules",
    "members",
    "nadam_product",
    "name_of",
    "path_matches",
    "path_of",
    "public_config",
    "rate_of",
    "reduced_gradients",
    "register_tree_node",
    "remember_trainable_variables",
    "restore_unsaved",
    "rule_of",
    "saved_by_keras",
    "schedule_of",
    "sharded_slots",
    "slots",
    "storage",
    "track_variable",
    "trainable_variables",
    "twin",
    "uses_weight_decay",
    "warn_of_missing",
    "weights",
    "where_variables_are_made",
]
