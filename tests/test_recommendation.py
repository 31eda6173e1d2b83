"""`recommend`: which dtype policy, layers in float32, loss scale and optimizer."""

from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

import keras_lso
from keras_lso import GuardedOptimizer, LossScaleOptimizer
from keras_lso._backend import backend
from keras_lso.loss_scales import DynamicLossScale, FixedLossScale, LogMaxLossScale

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = X[:, :1]


def make_model(policy="float32", last=None, optimizer="sgd", factor=1.0):
    """A model whose `scaled` and `norm` overflow in float16 at a factor of 1e6."""
    parts = [
        layers.Dense(8, "tanh", name="hidden", dtype=policy),
        layers.Rescaling(factor, name="scaled", dtype=policy),
        layers.LayerNormalization(name="norm", dtype=policy),
        layers.Dense(1, name="last", dtype=last or policy),
    ]
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), *parts], name="model")
    model.dtype_policy = policy
    if optimizer is not None:
        # Keras would wrap a bare one.
        model.compile(optimizer, "mse", auto_scale_loss=False)
    return model


def policies_of(model):
    return [layer.dtype_policy.name for layer in model.layers]


def recommend(model, hardware="gpu:7.5", x=X, y=Y):
    return keras_lso.recommend(model, x, y, hardware=hardware)


TABLE = {
    "cpu": ("float32", None),
    "gpu:6.1": ("float32", None),
    "gpu:7.0": ("mixed_float16", "LossScaleOptimizer"),
    "gpu:7.5": ("mixed_float16", "LossScaleOptimizer"),
    "gpu:8.0": ("mixed_bfloat16", "GuardedOptimizer"),
    "gpu:12.0": ("mixed_bfloat16", "GuardedOptimizer"),
    "tpu": ("mixed_bfloat16", "GuardedOptimizer"),
}


@pytest.mark.parametrize("hardware, expected", TABLE.items())
@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_hardware_determines_dtype_policy_and_optimizer(policy, hardware, expected):
    model = make_model(policy)
    found = recommend(model, hardware)
    assert (found.hardware, found.dtype_policy, found.optimizer) == (
        hardware,
        *expected,
    )
    assert found.layers_in_float32 == []
    assert found.master_weights is None
    assert (found.initial_scale is None) is (expected[0] != "mixed_float16")
    applied = found.apply(model)
    assert {*policies_of(applied), applied.dtype_policy.name} == {expected[0]}
    assert type(applied.optimizer).__name__ == (expected[1] or "SGD")
    if found.initial_scale is not None:
        assert float(applied.optimizer.loss_scale) == found.initial_scale


@pytest.mark.parametrize("hardware", ["cpu", "gpu:7.5", "gpu:8.0", "tpu"])
@pytest.mark.parametrize(
    "dtype, wrapper",
    [("bfloat16", "GuardedOptimizer"), ("float16", "LossScaleOptimizer")],
)
def test_16_bit_weights_keep_dtype_and_have_float32_masters(dtype, wrapper, hardware):
    model = make_model(dtype)
    found = recommend(model, hardware)
    assert (found.dtype_policy, found.optimizer) == (dtype, wrapper)
    assert found.master_weights == "float32"
    is_slow = {"float16": ("cpu", "tpu"), "bfloat16": ("cpu", "gpu:7.5")}[dtype]
    slow = any("is slow in" in reason for reason in found.reasons)
    assert slow is (hardware in is_slow)
    applied = found.apply(model)
    assert set(policies_of(applied)) == {dtype}
    applied.train_on_batch(X, Y)
    assert len(applied.optimizer._masters.masters) == 6


@pytest.mark.parametrize("hardware", ["gpu:7.5", "gpu:8.0"])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_float32_layers_of_16_bit_model_stay_in_float32(policy, hardware):
    model = make_model(policy, last="float32")
    found = recommend(model, hardware)
    assert found.layers_in_float32 == ["last"]
    assert any(r.startswith("last already computes in float32") for r in found.reasons)
    new = TABLE[hardware][0]
    assert policies_of(found.apply(model)) == [new, new, new, "float32"]
    # On a CPU all layers are in float32.
    assert recommend(model, "cpu").layers_in_float32 == []


@pytest.mark.parametrize(
    "policy, last, kept",
    [
        ("float32", None, ["scaled", "norm"]),
        ("mixed_float16", "float32", ["scaled", "norm", "last"]),
        ("mixed_bfloat16", "float32", ["scaled", "norm", "last"]),
        ("float16", None, ["scaled", "norm"]),
        ("bfloat16", None, []),
    ],
)
def test_layers_that_overflow_in_float16_stay_in_float32(policy, last, kept):
    model = make_model(policy, last, factor=1e6)
    found = recommend(model)
    assert found.layers_in_float32 == kept
    overflow = [r for r in found.reasons if r.startswith("scaled: overflow")]
    assert len(overflow) == (policy != "bfloat16")
    applied = found.apply(model)
    kinds = ["float32" if p in kept else "other" for p in ("hidden", "scaled", "norm")]
    new = {"float16": "float16", "bfloat16": "bfloat16"}.get(policy, "mixed_float16")
    assert policies_of(applied)[:3] == [new if k == "other" else k for k in kinds]
    if policy != "bfloat16":
        losses = [float(applied.train_on_batch(X, Y)) for _ in range(3)]
        assert losses[2] < losses[0] and int(applied.optimizer.skipped_steps) == 0


def test_initial_scale_matches_float16_report():
    model = make_model()
    expected = keras_lso.float16_report(model, X, Y).recommended_scale
    assert recommend(model).initial_scale == expected != 2.0**15
    # A smaller loss has a higher scale.
    small = keras_lso.recommend(
        model, X, Y, sample_weight=np.full(8, 2.0**-6), hardware="gpu:7.5"
    )
    assert small.initial_scale == expected * 2**6


def batch_with(part, value):
    batch = {"x": X.copy(), "y": Y.copy()}
    batch[part][3] = value
    return batch


@pytest.mark.parametrize(
    "optimizer, batch, reason",
    [
        ("sgd", {"y": None}, "There are no gradients"),
        (None, {}, "There are no gradients"),
        ("sgd", batch_with("x", np.nan), "The gradients contain inf or NaN in float32"),
        ("sgd", batch_with("y", np.inf), "The gradients contain inf or NaN in float32"),
        ("sgd", {"sample_weight": np.zeros(8)}, "The gradients in float16 are all 0."),
    ],
)
def test_initial_scale_is_default_without_usable_gradients(optimizer, batch, reason):
    given = {"x": X, "y": Y, "hardware": "gpu:7.5", **batch}
    found = keras_lso.recommend(make_model(optimizer=optimizer), **given)
    assert found.initial_scale == 2.0**15
    assert found.reasons[-1].startswith(reason)


def test_auto_hardware_is_device_of_model(monkeypatch):
    assert recommend(make_model(), "auto").hardware == "cpu"
    seen = []
    monkeypatch.setattr(
        backend.host, "hardware_of", lambda value: seen.append(value) or "gpu:8.6"
    )
    assert recommend(make_model(), "auto").dtype_policy == "mixed_bfloat16"
    # A model without weights is where its inputs are.
    bare = keras.Sequential([keras.Input((4,)), layers.Rescaling(2.0)])
    assert recommend(bare, "auto", y=None).hardware == "gpu:8.6"
    assert [tuple(value.shape) for value in seen] == [(4, 8), (8, 4)]


def test_auto_hardware_raises_error_on_unknown_device(monkeypatch):
    monkeypatch.setattr(backend.host, "hardware_of", lambda value: None)
    with pytest.raises(ValueError, match="Name hardware that is fast.*'gpu:7.5'"):
        recommend(make_model(), "auto")
    assert recommend(make_model(), "tpu").dtype_policy == "mixed_bfloat16"


def test_gpus_of_the_page_have_names(monkeypatch):
    capabilities = {"V100": 7.0, "T4": 7.5, "RTX 20": 7.5, "A100": 8.0, "RTX 30": 8.6}
    newer = {"L4": 8.9, "H100": 9.0, "H200": 9.0, "B200": 10.0}
    for name, capability in (capabilities | newer).items():
        assert recommend(make_model(), name).hardware == f"gpu:{capability}"
    page = (Path(__file__).parents[1] / "docs/which-setup.md").read_text()
    assert all(name in page for name in capabilities)


@pytest.mark.parametrize(
    "hardware", ["gpu", "gpu:7", "gpu:7.5.1", "GPU:7.5", "v100", "", None, 7.5, ["cpu"]]
)
def test_invalid_hardware_names_are_rejected(hardware):
    with pytest.raises(ValueError, match="`hardware` must be 'auto'.*Received: hard"):
        recommend(make_model(), hardware)


def applied_optimizer(optimizer, hardware="gpu:7.5", policy="float32"):
    model = make_model(policy, optimizer=optimizer)
    found = recommend(model, hardware)
    return found.apply(model).optimizer, found


@pytest.mark.parametrize("wrapper", [LossScaleOptimizer, GuardedOptimizer])
@pytest.mark.parametrize("hardware", ["cpu", "gpu:7.5", "gpu:8.0"])
def test_apply_preserves_user_settings_of_optimizer_wrapper(hardware, wrapper):
    guard = keras_lso.SpikeGuard(window=16, warmup=8)
    old = wrapper(
        keras.optimizers.SGD(0.5, momentum=0.75),
        spike_guard=guard,
        master_weights="remainder",
        slot_dtype="bfloat16",
    )
    new, found = applied_optimizer(old, hardware, "bfloat16")
    assert found.master_weights == new.master_weights == "remainder"
    new, _ = applied_optimizer(old, hardware)
    # A guard needs a wrapper, in float32 as well.
    assert type(new).__name__ == (TABLE[hardware][1] or "GuardedOptimizer")
    assert new.spike_guard.get_config() == guard.get_config()
    assert new.slot_dtype == "bfloat16"
    inner = new.inner_optimizer
    assert inner is not old.inner_optimizer
    assert (float(inner.learning_rate), inner.momentum) == (0.5, 0.75)


def test_recommendation_for_cpu_drops_loss_scaling_but_keeps_guard():
    sgd = keras.optimizers.SGD
    assert type(applied_optimizer(LossScaleOptimizer(sgd()), "cpu")[0]) is type(sgd())
    new, _ = applied_optimizer(keras.optimizers.LossScaleOptimizer(sgd(0.5)), "cpu")
    assert type(new) is type(sgd()) and float(new.learning_rate) == 0.5
    assert isinstance(
        applied_optimizer(GuardedOptimizer(sgd()), "cpu")[0], GuardedOptimizer
    )


def test_loss_scale_policy_is_kept_with_recommended_initial_scale():
    sgd = keras.optimizers.SGD
    policy = DynamicLossScale(2.0, increment_period=7, hysteresis=2)
    new, found = applied_optimizer(LossScaleOptimizer(sgd(), loss_scale=policy))
    expected = {**policy.get_config(), "initial_loss_scale": found.initial_scale}
    assert new.loss_scale_policy.get_config() == expected
    assert new.loss_scale_policy is not policy
    new, found = applied_optimizer(
        LossScaleOptimizer(sgd(), max_scale=4, initial_scale=2)
    )
    assert found.initial_scale > new.loss_scale_policy.initial_loss_scale == 4.0
    fixed = LossScaleOptimizer(sgd(), dynamic=False, initial_scale=2)
    new, found = applied_optimizer(fixed)
    assert isinstance(new.loss_scale_policy, FixedLossScale)
    assert float(new.loss_scale) == found.initial_scale
    log_max = LossScaleOptimizer(sgd(), loss_scale=LogMaxLossScale(log_max=15.0))
    new, _ = applied_optimizer(log_max)
    assert new.loss_scale_policy.get_config() == log_max.loss_scale_policy.get_config()


def test_recommendation_rejects_model_without_layers_or_weights():
    found = recommend(make_model(factor=1e6))
    other = keras.Sequential([keras.Input((4,)), layers.Dense(1, name="scale")])
    with pytest.raises(ValueError, match=r"has no 'scaled'. Similar are: \['scale'\]"):
        found.apply(other)
    with pytest.raises(TypeError, match="must be a keras.Model"):
        found.apply("model")
    unbuilt = keras.Sequential([layers.Dense(1)])
    with pytest.raises(ValueError, match="must be built"):
        recommend(make_model(), "tpu").apply(unbuilt)


def test_recommend_rejects_quantized_model():
    quantized = make_model()
    quantized.quantize("int8")
    with pytest.raises(ValueError, match="must not be quantized"):
        recommend(quantized)


def test_recommendation_prints_settings_in_words():
    text = str(recommend(make_model("float16", factor=1e6)))
    for words in (
        "dtype policy       float16",
        "layers in float32  scaled, norm",
        "keras_lso.LossScaleOptimizer(optimizer, initial_scale=2**",
        "masters            float32",
        "scaled: overflow, above 65504",
    ):
        assert words in text
    assert "keras_lso.GuardedOptimizer(optimizer" in str(recommend(make_model(), "tpu"))
    text = str(recommend(make_model(), "cpu"))
    assert "layers in float32  all" in text and "without loss scaling" in text
    assert text.isascii()
