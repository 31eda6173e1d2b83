"""`keras-lso show`: what is in a file, told without making a model of it."""

import json
import zipfile

import h5py
import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_lso
from keras_lso import GuardedOptimizer, LossScaleOptimizer
from keras_lso.compat import untrusted_files
from keras_lso.compat.saved_files import contents_of
from keras_lso.diagnostics.training_bytes import bytes_of
from keras_lso.loss_scales import LogMaxLossScale

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
ENDINGS = (".keras", ".h5", ".weights.h5")


def trained(optimizer, policy="mixed_float16", last="float32"):
    """A model after two steps, and one more that overflows."""
    parts = [layers.Dense(3, dtype=policy), layers.Dense(1, dtype=last)]
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), *parts])
    model.compile(optimizer, "mse")
    for factor in (1.0, 1.0, np.inf):
        model.train_on_batch(X * np.float32(factor), X[:, :1])
    return model


def saved(model, path):
    is_weights = path.name.endswith(".weights.h5")
    (model.save_weights if is_weights else model.save)(path)
    return contents_of(path)


def adam():
    return keras.optimizers.Adam(0.25)


@pytest.mark.in_turn
@pytest.mark.parametrize("ending", ENDINGS)
def test_contents_match_scale_and_counters_of_optimizer(ending, tmp_path):
    optimizer = LossScaleOptimizer(adam(), initial_scale=64.0, dynamic_growth_steps=7)
    model = trained(optimizer)
    found = saved(model, tmp_path / f"model{ending}").optimizer
    assert found.loss_scale == float(optimizer.loss_scale) == 32.0
    assert found.applied_steps == int(optimizer.iterations) == 2
    assert found.skipped_steps == int(optimizer.skipped_steps) == 1
    assert found.step_counter == int(ops.convert_to_numpy(optimizer.step_counter)) == 0
    assert found.variables == 14
    assert (found.masters or {"number": 0})["number"] == 0
    if ending == ".weights.h5":
        # Nothing names a class there.
        assert found.name is found.inner_optimizer is found.policy is None
        return
    assert found.name == "keras_lso.LossScaleOptimizer"
    assert found.inner_optimizer == "keras.optimizers.Adam"
    assert found.learning_rate == 0.25
    assert found.policy == "DynamicLossScale"
    assert found.policy_config == {"initial_scale": 64.0, "dynamic_growth_steps": 7}


def accumulating():
    return keras.optimizers.SGD(0.25, gradient_accumulation_steps=2)


@pytest.mark.in_turn
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(
    "make",
    [
        accumulating,
        lambda: keras_lso.LARC(accumulating()),
        lambda: LossScaleOptimizer(accumulating(), initial_scale=64.0),
        lambda: LossScaleOptimizer(keras_lso.LARC(accumulating()), initial_scale=64.0),
        lambda: GuardedOptimizer(accumulating()),
    ],
    ids=["plain", "LARC", "scaled", "scaled LARC", "guarded"],
)
def test_applied_steps_are_updates_of_accumulated_gradients(make, ending, tmp_path):
    optimizer = make()
    model = trained(optimizer, "float32")
    for _ in range(3):
        model.train_on_batch(X, X[:, :1])
    found = saved(model, tmp_path / f"model{ending}").optimizer
    skipped = getattr(optimizer, "skipped_steps", None)
    assert found.skipped_steps == (None if skipped is None else int(skipped))
    micro_batches = 6 - (found.skipped_steps or 0)
    if ending == ".weights.h5":  # Nothing names the length of a window there.
        assert found.applied_steps == micro_batches
    else:
        assert found.applied_steps == int(optimizer.iterations) == micro_batches // 2


@pytest.mark.in_turn
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("kind", ["auto", "remainder", "stochastic"])
def test_contents_count_master_weights(kind, ending, tmp_path):
    guard = keras_lso.SpikeGuard(window=16, warmup=8)
    optimizer = LossScaleOptimizer(
        adam(), loss_scale=LogMaxLossScale(), master_weights=kind, spike_guard=guard
    )
    model = trained(optimizer, "bfloat16", "bfloat16")
    masters = saved(model, tmp_path / f"model{ending}").optimizer.masters
    # A numbered state has the numbers of any kind, a named one what is in memory.
    size = 4
    if ending == ".h5":
        size = {"auto": 4, "remainder": 2, "stochastic": 0}[kind]
    assert masters["number"] == (4 if size else 0)
    assert masters["bytes"] == size * (4 * 3 + 3 + 3 + 1)
    assert masters["kind"] == (None if ending == ".weights.h5" else kind)


@pytest.mark.in_turn
@pytest.mark.parametrize("ending", ENDINGS)
def test_contents_of_guarded_optimizer_have_no_loss_scale(ending, tmp_path):
    model = trained(GuardedOptimizer(adam()), "bfloat16")
    found = saved(model, tmp_path / f"model{ending}").optimizer
    assert found.loss_scale is found.step_counter is found.policy is None
    assert (found.applied_steps, found.skipped_steps) == (2, 1)
    assert found.masters["number"] == 2


@pytest.mark.in_turn
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("is_named", [True, False])
def test_contents_describe_keras_loss_scale_optimizer(is_named, ending, tmp_path):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        optimizer = adam()
        if is_named:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        # Else `compile` wraps it, and a `.keras` file does not say so.
        model = trained(optimizer)
    finally:
        keras.config.set_dtype_policy(before)
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer
    found = saved(model, tmp_path / f"model{ending}").optimizer
    expected = model.optimizer.dynamic_scale, model.optimizer.inner_optimizer.iterations
    assert found.loss_scale == float(ops.convert_to_numpy(expected[0])) < 2.0**15
    assert found.applied_steps == int(ops.convert_to_numpy(expected[1])) >= 1
    # It does not count them.
    assert found.skipped_steps is None
    if ending != ".weights.h5":
        assert found.name.endswith("LossScaleOptimizer")
        assert not found.name.startswith("keras_lso")
        assert found.inner_optimizer == "keras.optimizers.Adam"
        assert found.policy == "DynamicLossScale"


@pytest.mark.in_turn
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(
    "make", [adam, lambda: keras_lso.LARC(keras.optimizers.SGD(0.25))]
)
def test_contents_of_unscaled_optimizer_have_no_loss_scale(make, ending, tmp_path):
    model = trained(make(), "float32")
    found = saved(model, tmp_path / f"model{ending}").optimizer
    assert found.loss_scale is found.skipped_steps is found.masters is None
    assert found.applied_steps == 3
    if ending != ".weights.h5":
        assert found.learning_rate == 0.25


@pytest.mark.one_backend
def test_contents_of_other_wrapper_have_no_loss_scale(tmp_path):
    # Its own two variables, then those of what it wraps.
    inner = [np.int32(7), np.float32(0.5), np.ones(3, "float32")]
    with h5py.File(tmp_path / "model.weights.h5", "w") as file:
        for i, value in enumerate(inner):
            file[f"optimizer/inner_optimizer/vars/{i}"] = value
        for i, value in enumerate([np.int32(9), np.float32(0.0), *inner]):
            file[f"optimizer/vars/{i}"] = value
    found = contents_of(tmp_path / "model.weights.h5").optimizer
    assert found.loss_scale is found.skipped_steps is None
    assert (found.applied_steps, found.variables) == (9, 5)


@pytest.mark.in_turn("jax")
def test_contents_name_schedule_and_fixed_scale(tmp_path):
    rate = keras.optimizers.schedules.CosineDecay(0.1, 10)
    inner = keras.optimizers.Adam(rate)
    fixed = LossScaleOptimizer(inner, dynamic=False, initial_scale=8.0)
    found = saved(trained(fixed), tmp_path / "model.keras").optimizer
    assert found.learning_rate == "keras.optimizers.schedules.CosineDecay"
    assert (found.policy, found.loss_scale) == ("FixedLossScale", 8.0)


@pytest.mark.in_turn
@pytest.mark.parametrize("ending", ENDINGS)
def test_contents_count_weights_and_dtype_policies(ending, tmp_path):
    model = trained(LossScaleOptimizer(adam()), "bfloat16")
    found = saved(model, tmp_path / f"model{ending}")
    assert found.weights == {
        "bfloat16": {"number": 2, "bytes": 2 * 15},
        "float32": {"number": 2, "bytes": 4 * 4},
    }
    assert sum(c["bytes"] for c in found.weights.values()) == sum(
        map(bytes_of, model.weights)
    )
    is_model = ending != ".weights.h5"
    assert found.model == ("Sequential" if is_model else None)
    policies = {"bfloat16": 1, "float32": 1} if is_model else None
    assert found.dtype_policies == policies


@pytest.mark.in_turn("torch")
def test_contents_count_dtype_policies_of_nested_layers(tmp_path):
    x = keras.Input((5, 4))
    inner = keras.Sequential([layers.Dense(4, dtype="mixed_float16")], name="inner")
    y = layers.TimeDistributed(layers.Dense(4, dtype="mixed_bfloat16"))(inner(x))
    model = keras.Model(x, layers.Dropout(0.5)(y))
    found = saved(model, tmp_path / "model.keras")
    assert found.model == "Functional"
    assert found.dtype_policies["mixed_float16"] == 1
    assert found.dtype_policies["mixed_bfloat16"] == 1
    # Neither an input nor a seed is one.
    assert found.dtype_policies["float32"] == 3
    assert found.optimizer is None


@pytest.mark.in_turn("tensorflow")
def test_contents_convert_to_json_and_text(tmp_path):
    optimizer = LossScaleOptimizer(adam(), initial_scale=64.0)
    found = saved(trained(optimizer), tmp_path / "model.keras")
    assert json.loads(json.dumps(found.to_dict()))["optimizer"]["loss_scale"] == 32.0
    text = str(found)
    for words in (
        f"{tmp_path / 'model.keras'}, model",
        "float32: 1 layer, mixed_float16: 1 layer",
        "keras.optimizers.Adam",
        "loss scale         2**5",
        "skipped steps      1",
        "DynamicLossScale(initial_scale=64, dynamic_growth_steps=2000)",
        "masters            none, master_weights='auto'",
    ):
        assert words in " ".join(text.split("\n")), text


@pytest.mark.in_turn("jax")
def test_contents_omit_missing_parts_from_text(tmp_path):
    model = trained(GuardedOptimizer(adam()), "bfloat16", "bfloat16")
    text = str(saved(model, tmp_path / "model.weights.h5"))
    for words in (
        "weights        4 bfloat16 (38 bytes)",
        "the file does not name the class",
        "of 4 weights (76 bytes)",
    ):
        assert words in text, text
    assert "scale" not in text and "dtype policies" not in text
    for name in ("bare.keras", "bare.h5", "bare.weights.h5"):
        bare = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        found = saved(bare, tmp_path / name)
        assert found.optimizer is None
        assert "none" in str(found).splitlines()[-1]


@pytest.mark.one_backend
def test_contents_describe_tf_keras_2_optimizer(tmp_path):
    inner = {"class_name": "SGD", "config": {"learning_rate": 0.5}}
    arguments = {"inner_optimizer": inner, "initial_scale": 8.0}
    optimizer = {"class_name": "LossScaleOptimizer", "config": arguments}
    dense = {"class_name": "Dense", "config": {"trainable": True, "dtype": "float32"}}
    with h5py.File(tmp_path / "model.h5", "w") as file:
        model = {"class_name": "Sequential", "config": {"layers": [dense]}}
        file.attrs["model_config"] = json.dumps(model)
        file.attrs["training_config"] = json.dumps({"optimizer_config": optimizer})
        file.attrs["keras_version"] = "2.15.0"
        group = file.create_group("optimizer_weights")
        group["SGD/iter:0"] = np.int64(7)
        group["SGD/dense/kernel/momentum:0"] = np.float32([0.5])
        group.attrs["weight_names"] = ["SGD/iter:0", "SGD/dense/kernel/momentum:0"]
    found = contents_of(tmp_path / "model.h5").optimizer
    assert (found.name, found.inner_optimizer) == ("LossScaleOptimizer", "SGD")
    assert (found.applied_steps, found.variables) == (7, 2)
    # Such a file holds none.
    assert found.loss_scale is found.skipped_steps is found.masters is None


# --- Nothing is made ----------------------------------------------------------------


def archive_of(path, config, weights=None):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        is_text = isinstance(config, str)
        archive.writestr("config.json", config if is_text else json.dumps(config))
        if weights is not None:
            archive.writestr("model.weights.h5", weights)
    return path


HOSTILE = {
    "module": "evil",
    "class_name": "Evil\x1b[2J",
    "registered_name": None,
    "config": {
        "layers": [
            {
                "module": "keras.layers",
                "class_name": "Lambda",
                "config": {"trainable": True, "dtype": "float32", "function": "import"},
            }
        ]
    },
    "compile_config": {
        "optimizer": {"module": "evil", "class_name": "Evil", "config": {}}
    },
}


@pytest.mark.one_backend
def test_reading_hostile_file_imports_no_class(tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    found = contents_of(archive_of(tmp_path / "model.keras", HOSTILE))
    assert found.optimizer.name == "evil.Evil"
    assert found.dtype_policies == {"float32": 1}
    # Neither does it move the cursor.
    assert "Evil\\x1b[2J" in str(found)
    assert "\x1b" not in str(found)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "`config.json` in the archive cannot be read"),
        ("[]", "must be that of a model"),
        ("{}", "The config of the model is damaged"),
        ('{"config": []}', "The config of the model is damaged"),
        ("[" * 100_000, "maximum recursion depth"),
        ('{"config": ' + "1" * 5000 + "}", "cannot be read"),
    ],
)
def test_damaged_config_is_rejected(config, words, tmp_path):
    path = archive_of(tmp_path / "model.keras", config)
    with pytest.raises(ValueError, match=words) as error:
        contents_of(path)
    assert str(path) in str(error.value)


@pytest.mark.one_backend
def test_deeply_nested_config_is_read(tmp_path):
    layer = {"class_name": "Dense", "config": {"trainable": True, "dtype": "float16"}}
    nested = json.dumps(layer)
    for _ in range(100):
        nested = f'{{"config": {{"layer": [{nested}]}}, "class_name": "Outer"}}'
    found = contents_of(archive_of(tmp_path / "model.keras", nested))
    assert found.dtype_policies == {"float16": 1}


@pytest.mark.one_backend
@pytest.mark.parametrize("value", [3, "Adam", [1], {"class_name": None}, {"config": 1}])
def test_malformed_optimizer_config_is_tolerated(value, tmp_path):
    config = {"config": {}, "class_name": "Model"}
    config["compile_config"] = {"optimizer": value}
    found = contents_of(archive_of(tmp_path / "model.keras", config))
    assert found.optimizer.loss_scale is None
    assert str(found)


@pytest.mark.one_backend
def test_decompression_bomb_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(untrusted_files, "_LARGE", 2**20)
    path = archive_of(tmp_path / "model.keras", {"config": {}}, bytes(2**21))
    with pytest.raises(
        ValueError, match=r"model\.keras.*'model\.weights\.h5'.*unpacked"
    ):
        contents_of(path)


@pytest.fixture
def weights_file(tmp_path):
    path = tmp_path / "model.weights.h5"
    trained(LossScaleOptimizer(keras.optimizers.SGD(0.5))).save_weights(path)
    return path


@pytest.mark.in_turn("jax")
@pytest.mark.parametrize("name", ["3", "5"])
def test_state_behind_external_link_is_rejected(name, weights_file, tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["secret"] = np.float32(42)
    with h5py.File(weights_file, "r+") as file:
        del file["optimizer/vars"][name]
        file["optimizer/vars"][name] = h5py.ExternalLink(
            str(tmp_path / "other.h5"), "/secret"
        )
    with pytest.raises(ValueError, match=f"{weights_file}.*in the file itself"):
        contents_of(weights_file)


@pytest.mark.in_turn("torch")
def test_cyclic_groups_do_not_change_counted_weights(weights_file):
    expected = contents_of(weights_file).weights
    with h5py.File(weights_file, "r+") as file:
        file["layers/again"] = file["layers"]
        file["layers/dense/up"] = file["/"]
        file["layers/soft"] = h5py.SoftLink("/layers/dense/vars/0")
    assert contents_of(weights_file).weights == expected


@pytest.mark.in_turn("tensorflow")
def test_incomplete_and_truncated_files_are_rejected(weights_file):
    with h5py.File(weights_file, "r+") as file:
        del file["optimizer/vars"]["3"]
    with pytest.raises(ValueError, match=f"{weights_file}.*no dataset '3'"):
        contents_of(weights_file)
    weights_file.write_bytes(weights_file.read_bytes()[:3000])
    with pytest.raises(ValueError, match=str(weights_file)):
        contents_of(weights_file)


@pytest.mark.one_backend
def test_files_without_keras_model_are_rejected(tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["numbers"] = np.ones(3)
    (tmp_path / "text.keras").write_text("text")
    np.savez(tmp_path / "batch.npz", x=X)
    for name, words in (
        ("other.h5", "neither a Keras model nor Keras weights"),
        ("text.keras", "neither a `.keras` file nor an HDF5 file"),
        ("batch.npz", "no `config.json`"),
    ):
        with pytest.raises(ValueError, match=f"{tmp_path / name}.*{words}"):
            contents_of(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="none"):
        contents_of(tmp_path / "none.keras")
    with pytest.raises(IsADirectoryError):
        contents_of(tmp_path)
