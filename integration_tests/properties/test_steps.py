"""The invariants, after each step of any case.

1. A skipped step changes nothing that the optimizer owns, bit for bit.
2. An applied one is the inner optimizer's own step on the unscaled gradients.
3. The loss scale is that of the policy's formula in NumPy, finite, and within bounds.
4. The counters are those of the model.
5. No weight becomes inf or NaN that would not become so without loss scaling.
6. Saved, loaded and continued is as good as uninterrupted.
"""

import hypothesis
import numpy as np
import pytest

from integration_tests.properties import bare as bares
from integration_tests.properties import cases, execution, runs
from integration_tests.properties.budget import cases as tried_on

pytestmark = [
    pytest.mark.filterwarnings("ignore:Gradients do not exist"),
    # A case may have one variable, which is no bias.
    pytest.mark.filterwarnings("ignore:A pattern matches no variable"),
]

# Some ten roundings of 6e-8 a step, of numbers that are no larger than the largest that
# the tensor has held. A norm, and what is divided by it, adds as many again.
SHARE, SHARE_WITH_NORMS = 1e-6, 2e-6


def tolerance(case, took_kernels, scales):
    """Returns by what share of the largest magnitude a tensor may be off."""
    is_fused = case.execution in ("jit", "xla")
    # XLA puts the multiplication by another number together with what comes after.
    are_powers = all(np.frexp(scale)[0] == 0.5 for scale in scales)
    # A product and a sum it may round at once, in the one program and not in the other.
    adds_products = case.inner.adds_products
    is_rounded_otherwise = case.inner.reduces or not are_powers or adds_products
    if not took_kernels and not (is_fused and is_rounded_otherwise):
        return 0.0
    if case.inner.reduces:
        return SHARE_WITH_NORMS
    return SHARE


def check(case, folder=None):
    """Runs a case, and holds each step against what is expected of it."""
    with execution.kernels(case.has_kernels) as kernels_were_taken:
        run = runs.Run(case)
        bare = bares.Bare(case, run)
        every, scales, is_saved = [run], [], case.saved is None
        for number, step in enumerate(case.steps):
            is_due = not is_saved and number >= case.saved[0]
            if is_due and case.saved[1] != cases.VARIABLES and run.holds_nan:
                with pytest.raises(ValueError, match="must not be NaN"):
                    runs.Run(case, of=run, folder=folder)
                is_saved = True
            elif is_due and run.counters.is_settled:
                every.append(runs.Run(case, of=run, folder=folder))
                every[-1].check_state()
                assert execution.bits(every[-1].saved) == execution.bits(run.saved)
                is_saved = True
            scales.append(float(run.optimizer.loss_scale))
            for one in every:
                unscaled, finite = one.step(step)
            if finite:
                bare.step(unscaled, step.call)
            for one in every:
                bare.compare(one, tolerance(case, kernels_were_taken(), scales))
            for one in every[1:]:
                assert execution.bits(one.saved) == execution.bits(run.saved)
        for v, e in zip(run.variables, bare.variables, strict=True):
            of_bare = np.isfinite(execution.array(e))
            assert (np.isfinite(execution.array(v)) == of_bare).all()
    config = run.optimizer.get_config()
    again = type(run.optimizer).from_config(config)
    assert again.get_config() == config


IN_MEMORY = (None, cases.OWN_VARIABLES, cases.VARIABLES)


@hypothesis.given(case=cases.cases(saved=IN_MEMORY))
@tried_on(nightly=1800, torch=40, tensorflow=5, jax=3)
def test_each_eager_step_keeps_all_invariants(case):
    check(case)


@pytest.mark.skipif(not cases.COMPILED, reason="Steps on PyTorch are eager")
@pytest.mark.parametrize("way", cases.COMPILED)
@hypothesis.given(data=hypothesis.strategies.data())
@tried_on(nightly=200, torch=1, tensorflow=1, jax=2)
def test_each_compiled_step_keeps_all_invariants(way, data):
    saved = (None, None, cases.OWN_VARIABLES)
    check(data.draw(cases.cases(way, saved)))


@hypothesis.given(case=cases.cases(saved=(cases.KERAS_FILE,)))
@tried_on(nightly=200, torch=4, tensorflow=1, jax=1)
def test_run_continued_from_keras_file_keeps_all_invariants(case, tmp_path_factory):
    check(case, tmp_path_factory.mktemp("files"))
