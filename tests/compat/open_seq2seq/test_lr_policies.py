"""`keras_lso.compat.open_seq2seq.lr_policies`: the page's functions of the step."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso.compat import open_seq2seq
from keras_lso.compat.open_seq2seq import lr_policies
from testing.signatures import without_types

# The page's, but for `dtype=tf.float32`; `cosine_decay` is not there.
SIGNATURES = {
    "fixed_lr": "(global_step, learning_rate)",
    "piecewise_constant": "(global_step, learning_rate, boundaries, decay_rates, "
    "steps_per_epoch=None)",
    "exp_decay": "(global_step, learning_rate, decay_steps, decay_rate, "
    "use_staircase_decay, begin_decay_at=0, min_lr=0.0)",
    "poly_decay": "(global_step, learning_rate, decay_steps, power=1.0, "
    "begin_decay_at=0, min_lr=0.0, warmup_steps=0)",
    "inv_poly_decay": "(global_step, learning_rate, decay_steps, min_lr, power=1.0, "
    "begin_decay_at=0, warmup_steps=0, name='learning_rate')",
    "cosine_decay": "(global_step, learning_rate, decay_steps, power=1.0, "
    "begin_decay_at=0, min_lr=0.0, warmup_steps=0)",
    "transformer_policy": "(global_step, learning_rate, d_model, warmup_steps, "
    "max_lr=None, coefficient=1.0, dtype='float32')",
}

# All arguments but the step, each one another number.
POLICIES = {
    "fixed_lr": (open_seq2seq.FixedLR, (0.5,)),
    "piecewise_constant": (
        open_seq2seq.PiecewiseConstant,
        (0.5, [1, 2.5], [0.4, 0.1], 2),
    ),
    "exp_decay": (open_seq2seq.ExpDecay, (0.5, 3, 0.4, True, 2, 0.01)),
    "poly_decay": (open_seq2seq.PolyDecay, (0.5, 5, 2.0, 3, 0.01, 4)),
    "inv_poly_decay": (open_seq2seq.InvPolyDecay, (0.5, 5, 0.01, 2.0, 3, 4)),
    "cosine_decay": (open_seq2seq.CosineDecayPolicy, (0.5, 5, 2.0, 3, 0.01, 4)),
    "transformer_policy": (
        open_seq2seq.TransformerPolicy,
        (0.5, 16, 4, 0.04, 0.9, "float16"),
    ),
}


def test_functions_and_signatures_match_page():
    assert set(lr_policies.__all__) == SIGNATURES.keys() == POLICIES.keys()
    for name, signature in SIGNATURES.items():
        function = getattr(lr_policies, name)
        assert without_types(function) == signature
        assert (function.__name__, function.__module__) == (name, lr_policies.__name__)


@pytest.mark.parametrize("name", POLICIES)
def test_function_gives_same_rate_as_its_class(name, compiled):
    cls, arguments = POLICIES[name]
    function = getattr(lr_policies, name)
    policy = cls(*arguments)
    step = keras.Variable(0, dtype="int", trainable=False)
    rate = compiled(lambda: function(step, *arguments), [step])
    for i in range(12):
        step.assign(i)
        expected = policy(i)
        eager = function(np.int64(i), *arguments)
        assert eager.dtype == expected.dtype == rate().dtype
        assert float(eager) == float(expected)
        # XLA may fuse a product and a sum, which saves one rounding.
        actual = float(ops.cast(rate(), "float32"))
        np.testing.assert_allclose(actual, float(expected), rtol=1e-6)


def test_invalid_arguments_are_rejected():
    with pytest.raises(ValueError, match="`decay_steps` must be"):
        lr_policies.poly_decay(0, 0.5, 0)
    with pytest.raises(TypeError, match="missing .*'decay_steps'"):
        lr_policies.poly_decay(0, 0.5)
