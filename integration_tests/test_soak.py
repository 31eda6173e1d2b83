"""A short slice of the long run that `make soak` makes, and what it is worth."""

import dataclasses

import pytest

from integration_tests import soak


def test_thousand_steps_match_model_without_growth():
    result = soak.soak(1000)
    assert 20 < result.skipped < 80
    # Up and down, from bound to bound.
    assert min(result.scales) == soak.MIN_SCALE
    assert max(result.scales) == soak.MAX_SCALE
    # In so few steps the pieces that an allocator takes are larger than a leak, and
    # other tests have left theirs: `make soak` looks at the bytes.
    end = dataclasses.replace(result.end, bytes=result.start.bytes)
    soak.check_growth(dataclasses.replace(result, end=end))


# It is the comparison that is tried, which is NumPy's on each of them.
@pytest.mark.default_backend("torch")
def test_soak_detects_drift_of_counters(monkeypatch):
    step = soak.Model.step

    def step_off_by_one(model, finite):
        step(model, finite)
        model.applied += model.applied == 17

    monkeypatch.setattr(soak.Model, "step", step_off_by_one)
    with pytest.raises(AssertionError, match="^step 1[0-9]: .*'iterations'"):
        soak.soak(30)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "growth", [{"objects": 9_000}, {"bytes": 90_000 * 500 // 10}, {"arrays": 1}]
)
def test_soak_detects_growth_of_memory_and_objects(growth):
    start = soak.Footprint(bytes=400 * 2**20, objects=250_000, arrays=12)
    more = {name: getattr(start, name) + by for name, by in growth.items()}
    end = dataclasses.replace(start, **more)
    result = soak.Result(100_000, 5_000, {}, 1.0, start, start)
    soak.check_growth(result)
    with pytest.raises(AssertionError, match=next(iter(growth))):
        soak.check_growth(dataclasses.replace(result, end=end))
