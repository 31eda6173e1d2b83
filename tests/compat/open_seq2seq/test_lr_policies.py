"""`keras_lso.compat.open_seq2seq.lr_policies`: the page's functions of the step."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso.compat import open_seq2seq
from keras_lso.compat.open_seq2seq import lr_policies

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
