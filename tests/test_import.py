"""Importing the package, in a process of its own, in which Keras may be there.

It imports no framework that Keras did not, and loads where nothing can be trained.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import pkgutil

import keras
import pytest

import keras_lso
from keras_lso import compat, schedules
from keras_lso.compat import model_garden, open_seq2seq
from testing import forked

LIST_FRAMEWORKS = """
import sys
def print_frameworks():
    roots = {name.partition(".")[0] for name in sys.modules}
    print(*sorted(roots & {"tensorflow", "jax", "torch", "triton"}))
import keras
print_frameworks()
import keras_lso, keras_lso._backend, keras_lso.compat.backend
import keras_lso.compat.saving, keras_lso.compat.tf_keras_files
print_frameworks()
"""

# A program that loads a model needs these: the optimizer is made, built and given its
# state.
LOAD_AN_OPTIMIZER = """
optimizer = keras_lso.deserialize(
    keras.optimizers.serialize(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.5))
    )
)
assert type(optimizer) is keras_lso.LossScaleOptimizer
optimizer.build([keras.Variable([1.0, 2.0])])
store = {}
optimizer.save_own_variables(store)
store["3"] = store["3"] * 0 + 64
optimizer.load_own_variables(store)
print("scale:", float(optimizer.loss_scale))
loss = optimizer.scale_loss(keras.ops.convert_to_tensor(2.0))
# OpenVINO's tensors are no numbers in Keras 3.12.
print("loss:", float(keras.ops.convert_to_numpy(loss)))
"""


# The error of each way to train. `fit` and `train_on_batch` are Keras's own.
TRY_TO_TRAIN = """
import numpy as np, keras, keras_lso
from keras_lso.compat.open_seq2seq import optimize_loss
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.1))
model.compile(optimizer, loss="mse")
x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
loss, trained = lambda: model(x)[0, 0], model.trainable_variables
monitor = keras_lso.callbacks.LossScaleMonitor()
for train in (
    lambda: model.fit(x, y, verbose=0),
    lambda: model.fit(x, y, verbose=0, callbacks=[monitor]),
    lambda: model.train_on_batch(x, y),
    lambda: optimizer.minimize(loss, trained),
    lambda: optimizer.get_gradients(loss, trained),
    lambda: keras_lso.underflow_report(model, x, y),
    optimize_loss(loss, "SGD", {}, lambda step: 0.1, var_list=trained),
    optimize_loss(loss, "SGD", {}, lambda step: 0.1, model=model),
    optimize_loss(loss, "SGD", {}, lambda step: 0.1),
):
    try:
        print(train())
    except NotImplementedError as error:
        print(str(error).lower())
print(int(optimizer.inner_optimizer.iterations.numpy()))
"""


def output(code, backend, **environment):
    result = forked.run(code, backend, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def skip_unless_installed(backend):
    if backend != "numpy" and importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")


# The backend under test; the three runs of the suite cover all of them.
BACKEND = os.environ["KERAS_BACKEND"]


# A kernel takes this step of LARS under every backend.
SHOW_KERNELS = """
from keras_lso._keras_internals.variables import storage_of
from keras_lso._backend import backend
from keras_lso._backend import KERNELS
from keras_lso.optimizers.lars import LARSRule
from keras_lso._backend.framework import Framework
from keras_lso._backend.leaves import Leaves
leaves = Leaves(storage_of([keras.Variable([1.0])]), [])
print(KERNELS, type(backend).measure is Framework.measure,
      backend.takes_update(LARSRule, leaves, [keras.ops.ones((1,))]))
"""


@pytest.mark.slow
def test_import_obeys_environment_variable_and_imports_no_framework(capsys):
    code = LIST_FRAMEWORKS + SHOW_KERNELS
    keras_alone, with_ours, last = output(code, BACKEND, KERAS_LSO_KERNELS="generic")
    assert with_ours == keras_alone
    assert BACKEND in with_ours.split()
    assert last == "generic True False"
    exec(SHOW_KERNELS, {"keras": keras})
    assert capsys.readouterr().out.split() == ["framework", "False", "True"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["numpy", pytest.param("openvino", marks=pytest.mark.full)]
)
def test_optimizer_loads_where_nothing_can_be_trained_and_errors_say_so(backend):
    skip_unless_installed(backend)
    code = LIST_FRAMEWORKS + LOAD_AN_OPTIMIZER + TRY_TO_TRAIN
    keras_alone, with_ours, scale, loss, *messages, steps = output(code, backend)
    assert with_ours == keras_alone
    assert (scale, loss) == ("scale: 64.0", "loss: 128.0")
    assert len(messages) == 9
    assert all(backend in message for message in messages)
    assert steps == "0"


@pytest.mark.slow
def test_invalid_kernels_environment_variable_is_rejected():
    result = forked.run("import keras_lso", "numpy", KERAS_LSO_KERNELS="fast")
    assert result.returncode == 1
    message = result.stderr.splitlines()[-1]
    choices = "'framework'", "'compile'", "'generic'"
    for word in ("KERAS_LSO_KERNELS='fast'", *choices):
        assert word in message
    assert message.startswith("ValueError")


LIST_COMPAT = """
import sys, keras, keras_lso
def modules():
    return sorted(n for n in sys.modules if n.startswith("keras_lso.compat"))
print(modules())
warmup = keras_lso.schedules.LinearWarmup(0.5, 4)
optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(warmup))
optimizer.apply([keras.ops.array([1.0])], [keras.Variable([1.0])])
print(modules())
late = ("keras_lso.callbacks", "keras_lso.diagnostics", "keras_lso.plotting")
print([name for name in sys.modules if name.startswith(late)])
print(*sorted(dir(keras_lso)))
assert all(hasattr(keras_lso, name) for name in keras_lso.__all__)
print(*sorted(dir(keras_lso.schedules)))
print(keras_lso.compat.v1.__name__, keras_lso.mixed_precision.__name__)
for module in (keras_lso, keras_lso.compat, keras_lso.schedules):
    print(hasattr(module, "no_such_name"))
"""


@pytest.mark.slow
def test_compat_modules_are_imported_lazily():
    first, after_a_step, late, names, of_schedules, modules, *others = output(
        LIST_COMPAT, BACKEND
    )
    assert late == "[]"
    assert first == after_a_step == "['keras_lso.compat']"
    assert set(keras_lso.__all__) <= set(names.split())
    assert set(schedules.__all__) <= set(of_schedules.split())
    assert modules == "keras_lso.compat.v1 keras_lso.mixed_precision"
    assert others == ["False"] * 3


LOAD_CLASSES_OF_COMPAT = """
import json, keras, keras_lso
for config in json.loads(CONFIGS):
    found = keras.saving.deserialize_keras_object(config)
    print(type(found).__module__ + "." + type(found).__name__)
"""


@pytest.mark.slow
def test_config_of_compat_class_deserializes_after_plain_import():
    from keras_lso.compat import v1
    from keras_lso.compat.open_seq2seq import optimizers

    def sgd():
        return keras.optimizers.SGD(0.5)

    # Some of them hold others.
    made = [
        open_seq2seq.MixedPrecisionOptimizerWrapper(sgd(), loss_scale=8.0),
        v1.mixed_precision.MixedPrecisionLossScaleOptimizer(sgd(), 8.0),
        optimizers.RMSProp(0.5),
        # Two classes that have other names in Python.
        schedules.JoinedSchedules([open_seq2seq.CosineDecayPolicy(0.5, 10), 0.1], [8]),
        open_seq2seq.CosineDecayPolicy(0.5, 10),
        keras.optimizers.SGD(model_garden.PowerDecayWithOffset(0.5)),
        schedules.LinearWarmup(open_seq2seq.PiecewiseConstant(0.5, [4], [0.5]), 4),
    ]
    configs = json.dumps([keras.saving.serialize_keras_object(o) for o in made])
    code = f"CONFIGS = {configs!r}\n{LOAD_CLASSES_OF_COMPAT}"
    expected = [f"{type(o).__module__}.{type(o).__name__}" for o in made]
    assert output(code, BACKEND) == expected


def test_late_classes_list_every_registered_compat_class():
    """Those that the modules register, which `compat/__init__.py` has to name."""
    for module in pkgutil.walk_packages(keras_lso.__path__, "keras_lso."):
        if module.name.startswith(("keras_lso.compat", "keras_lso.mixed_precision")):
            importlib.import_module(module.name)
    late = {
        name.removeprefix("keras_lso>"): cls.__module__
        for name, cls in keras.saving.get_custom_objects().items()
        if cls.__module__.startswith("keras_lso.compat")
        # The class that comes back is not the one that was saved.
        or name.startswith("keras_lso>mixed_precision.")
        if hasattr(cls, "get_config")  # no placeholder
    }
    assert sorted(late) == sorted(sum(compat.LATE_CLASSES.values(), ()))
    for module, names in compat.LATE_CLASSES.items():
        is_ours = [late[name].startswith(f"keras_lso.{module}") for name in names]
        assert all(is_ours) or module == "mixed_precision.experimental"


ROOT = pathlib.Path(__file__).parents[1]


def test_build_metadata_has_package_version():
    reason = "hatchling, which builds the package, is not installed"
    core = pytest.importorskip("hatchling.metadata.core", reason=reason)
    from hatchling.plugin.manager import PluginManager

    assert core.ProjectMetadata(ROOT, PluginManager()).version == keras_lso.__version__
