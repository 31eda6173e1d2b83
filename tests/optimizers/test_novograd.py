"""What `NovoGrad` alone promises: numbers by hand, its second moments, its norms."""

import numpy as np
import pytest
from keras import ops

from keras_lso import NovoGrad
from testing.layer_wise import (
    PATHS,
    SHAPES,
    assert_close,
    make_variables,
    values_of,
    variable,
)
from testing.optimizer_steps import stepper
from testing.tensors import tensor


def test_novograd_step_matches_hand_computed_values():
    w = variable("w", [3.0, 4.0])
    optimizer = NovoGrad(
        0.5, beta_1=0.5, beta_2=0.75, epsilon=11.0, weight_decay_rate=0.25
    )
    # v is 25, its root with epsilon 6.
    optimizer.apply([tensor([3.0, -4.0])], [w])
    m = np.array([3 / 6 + 0.75, -4 / 6 + 1.0])
    assert_close([w], [[3.0, 4.0] - m / 2])
    assert values_of(optimizer.second_moments) == [25]
    # v is 18.75 + 0.25 * 25 = 25.
    optimizer.apply([tensor([-5.0, 0.0])], [w])
    assert values_of(optimizer.second_moments) == [25]


def test_novograd_has_momentum_and_scalar_second_moment_per_variable(start):
    variables, optimizer = make_variables(start), NovoGrad(0.5)
    optimizer.minimize(lambda: sum(ops.sum(v * v) for v in variables), variables)
    assert optimizer.get_slot_names() == ["m", "v"]
    m, v = ([optimizer.get_slot(w, name) for w in variables] for name in "mv")
    assert [tuple(slot.shape) for slot in m] == SHAPES
    assert [tuple(slot.shape) for slot in v] == [()] * len(SHAPES)
    names = [f"{path.replace('/', '_')}_second_moment" for path in PATHS]
    assert [slot.name for slot in v] == names
    # As tf.keras orders them, and without the learning rate.
    assert [id(w) for w in optimizer.weights[1:]] == [id(slot) for slot in m + v]
    twin = NovoGrad(0.5)
    twin.build(variables)
    twin.set_weights(optimizer.get_weights())
    assert_close(twin.second_moments, values_of(v))


def test_overwritten_variable_has_no_second_moment():
    variables = make_variables([[3.0, 4.0], 1.0])
    variables[1].overwrite_with_gradient = True
    optimizer = NovoGrad(0.5)
    optimizer.build(variables)
    assert optimizer.second_moments[1] is None


@pytest.mark.each_backend
@pytest.mark.exhaustive
@pytest.mark.parametrize("epsilon", [1e-8, 0.0])
def test_first_nonzero_gradient_initializes_second_moment(wrap, compiled, epsilon):
    w, inner = variable("w", [3.0, 4.0]), NovoGrad(0.5, beta_1=0.5, epsilon=epsilon)
    step = stepper(compiled, wrap(inner), [w])
    for _ in range(2):
        step([np.zeros(2)])
        assert values_of([w])[0].tolist() == [3.0, 4.0]
        assert values_of(inner.second_moments) == [0]
    step([np.array([0.0, -100.0])])
    assert_close([w, *inner.second_moments], [[3.0, 4.5], 1e4])
    # Nothing but the momentum, and an average that falls.
    step([np.zeros(2)])
    assert_close([w, *inner.second_moments], [[3.0, 4.75], 0.98e4])


@pytest.mark.each_backend
def test_gradient_with_overflowing_norm_enters_neither_moment(wrap):
    w, inner = variable("w", [3.0, 4.0]), NovoGrad(0.5, beta_1=0.5)
    outer = wrap(inner)
    options = {"scaled": False} if outer is not inner else {}
    for gradient, expected in (
        ([1e25, -1e25], [3.0, 4.0]),
        ([0.0, 8.0], [3.0, 3.5]),
        ([1e25, -1e25], [3.0, 3.25]),
        ([0.0, 0.0], [3.0, 3.125]),
    ):
        outer.apply([tensor(gradient)], [w], **options)
        assert_close([w], [expected])
    # The last of them has let it fall; an inf would have stayed.
    assert_close(inner.second_moments, [64 * 0.98])
    assert int(inner.iterations) == 4
