"""What `make conformance` has recorded is current, and its programs tell faults."""

import importlib.metadata
import importlib.util
import inspect
import pathlib
import re

import keras
import numpy as np
import pytest
from packaging.utils import canonicalize_name

from benchmarks import evidence
from conformance import __main__ as conformance
from conformance.adapter import Adapter, State
from conformance.properties import PROPERTIES, ask
from integration_tests.docs_blocks import BACKEND, PAGES
from testing.pins import pins_of

RECORD = evidence.read(conformance.RESULTS)["participants"]
VERSIONS = {v for p in RECORD.values() for v in p["versions"].values()}
# PyTorch's take a second each, and others compile for several.
ADAPTERS = [
    pytest.param(
        adapter,
        id=adapter.name,
        marks=[pytest.mark.full] * (BACKEND != "torch" and adapter.name != "keras_lso"),
    )
    for adapter in conformance.adapters(BACKEND)
]


def test_record_is_of_pinned_versions_and_has_each_case():
    pinned = pins_of("dev") | pins_of("peers")
    assert len(RECORD) == 9
    for name, participant in RECORD.items():
        for package, version in participant["versions"].items():
            assert pinned[canonicalize_name(package)] == version, name
        for cells in participant["answers"].values():
            assert [*cells] == [*PROPERTIES], name


def test_package_holds_each_property_on_each_backend():
    answers = RECORD["keras_lso"]["answers"]
    assert [*answers] == ["tensorflow", "jax", "torch"]
    assert all(holds for cells in answers.values() for _, holds in cells.values())


@pytest.mark.each_backend
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_answers_are_recorded_ones(adapter):
    versions = RECORD[adapter.name]["versions"]
    if conformance.versions(adapter) != versions:
        pytest.skip(f"the record is of {versions}")
    cells = {case: tuple(c) for case, c in ask(adapter).items()}
    recorded = RECORD[adapter.name]["answers"][BACKEND]
    # Run `make conformance` if they differ.
    assert cells == {case: tuple(c) for case, c in recorded.items()}


def test_readme_names_lines_of_arguments_that_were_read():
    text = " ".join(PAGES["README.md"].read_text().split())
    import torch

    for name, version, class_ in (
        ("Keras", keras.__version__, keras.optimizers.LossScaleOptimizer),
        ("PyTorch", torch.__version__.partition("+")[0], torch.amp.GradScaler),
    ):
        read, file, line = re.search(
            rf"{name} ([\d.]+) \(`(\w+\.py):(\d+)`\)", text
        ).groups()
        if read != version:
            pytest.skip(f"It was {name} {read} that was read")
        assert inspect.getsourcefile(class_).endswith(f"/{file}")
        assert inspect.getsourcelines(class_.__init__)[1] == int(line)
        assert "hysteresis" not in inspect.signature(class_).parameters


READ = {
    "jmp/_src/loss_scale.py:139": "data = (self.loss_scale, self.counter)",
    "flax/training/dynamic_scale.py:87": "minimum_scale: float",
    "mpx/_grad_tools.py:166": "grad = loss_scaling_new.unscale(grad)",
    "optax/transforms/_conditionality.py:251": "zeros_like(updates), inner_state",
    "lightning_fabric/fabric.py:866": "state=_unwrap_objects(state)",
    "accelerate/accelerator.py:567": 'self.device.type != "cpu"',
}


@pytest.mark.parametrize("read", READ)
def test_named_lines_have_what_was_read(read):
    text = PAGES["docs/migrating-optax.md"].read_text()
    assert f"`{read}`" in text + PAGES["docs/migrating-grad-scaler.md"].read_text()
    package, _, path = read.partition("/")
    path, _, line = path.partition(":")
    if (found := importlib.util.find_spec(package)) is None:
        pytest.skip(f"{package} is not installed")
    distribution = {"mpx": "mixed-precision-for-JAX"}.get(package, package)
    if importlib.metadata.version(distribution) not in VERSIONS:
        pytest.skip(f"Another {package} was read")
    [folder] = found.submodule_search_locations
    lines = (pathlib.Path(folder) / path).read_text().splitlines()
    assert READ[read] in lines[int(line) - 1]


class Sound(Adapter):
    """Momentum in NumPy. A subclass has a fault."""

    name = "sound"
    offers = dict.fromkeys(
        ("floor", "fixed", "micro_batches", "observed", "guard", "skipped"), "offered"
    )
    fault = None

    def start(
        self, floor=2.0**-14, fixed=False, micro_batches=1, observed=False, guard=False
    ):
        floors = {"no floor": {2.0**-14: 0.0}, "no other floor": {4.0: 2.0**-14}}
        self.floor = floors.get(self.fault, {}).get(floor, floor)
        self.fixed, self.count, self.observed = fixed, micro_batches, observed
        self.limit = 100 if guard and self.fault != "no guard" else np.inf
        self.slots = [np.zeros_like(w) for w in self.weights]
        self.sums, self.micro = [np.zeros_like(w) for w in self.weights], 0
        self.good, self.skipped = 0, False

    def step(self, slopes, gain=1.0):
        with np.errstate(all="ignore"):
            self.take(slopes, np.float32(gain))

    def take(self, slopes, gain):
        scaled = [np.float32(self.scale) * gain * s for s in slopes]
        grows = self.good + 1 == self.growth_steps
        scale = self.scale * 2 if grows and self.fault == "next scale" else self.scale
        gradients = [g / np.float32(scale) for g in scaled]
        checked = scaled if self.fault == "checks scaled" else gradients
        finite = all(np.isfinite(g).all() for g in checked)
        if self.fault == "misses -inf":
            finite = not any((np.isnan(g) | (g == np.inf)).any() for g in checked)
        if self.fault == "fixed applies" and self.fixed:
            finite = True
        if self.fault == "looks change" and self.observed:
            gradients = [g / 2 for g in gradients]
        outlier = max(abs(g).max() for g in gradients) > self.limit
        self.skipped = not finite and self.fault != "says nothing"
        if finite and not outlier:
            self.apply(gradients)
        elif self.fault == "adds 0":
            self.weights = [w + np.float32(0) for w in self.weights]
        elif self.fault == "counts a bad micro-batch" and self.count > 1:
            self.apply([0 * w for w in self.weights])
        self.move_scale(finite, grows)

    def apply(self, gradients):
        self.sums = [s + g for s, g in zip(self.sums, gradients, strict=True)]
        self.micro += 1
        if self.micro >= self.count:
            pairs = zip(self.slots, self.sums, strict=True)
            self.slots = [0.9 * m + s / self.count for m, s in pairs]
            pairs = zip(self.weights, self.slots, strict=True)
            self.weights = [np.float32(w - 0.125 * m) for w, m in pairs]
            self.sums, self.micro = [0 * s for s in self.sums], 0

    def move_scale(self, finite, grows):
        self.good = 0 if grows or not finite else self.good + 1
        if self.fixed:
            return
        if not finite:
            self.scale = float(np.float32(max(self.scale / 2, self.floor)))
        elif grows:
            limit = np.inf if self.fault == "no ceiling" else 2.0**24
            self.scale = float(np.float32(min(self.scale * 2, limit)))

    def state(self):
        return State([*self.weights], [*self.slots], self.scale, self.skipped)

    def save(self):
        good = 0 if self.fault == "forgets its count" else self.good
        return [*self.slots], self.scale, good

    def load(self, saved):
        self.slots, self.scale, self.good = saved


FAULTS = {
    "no floor": [0, 1],
    "no ceiling": [2],
    "no other floor": [3],
    "fixed applies": [4],
    "adds 0": [5],
    "misses -inf": [6],
    "checks scaled": [7],
    "next scale": [8],
    "counts a bad micro-batch": [9],
    "forgets its count": [10],
    "looks change": [11],
    "says nothing": [12],
    "no guard": [13],
}


def failed(fault):
    found = ask(type("Faulty", (Sound,), {"fault": fault}))
    return [i for i, (_, holds) in enumerate(found.values()) if holds is False]


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_fails_its_property_alone(fault):
    assert failed(fault) == FAULTS[fault]


def test_sound_adapter_holds_each_property_and_each_can_fail():
    assert not failed(None)
    assert sum(FAULTS.values(), []) == [*range(len(PROPERTIES))]
