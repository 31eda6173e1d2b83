"""The benchmark counts and reports what it says it does, and all of it runs."""

import json
import math

import keras
import numpy as np
import pytest

# A source distribution has no benchmarks.
pytest.importorskip("benchmarks")

from benchmarks import fit
from benchmarks.__main__ import main
from benchmarks.bytes_moved import bytes_of_step
from benchmarks.data import check_healthy, make_data
from benchmarks.report import markdown
from benchmarks.shapes import SHAPES, parameters
from benchmarks.timing import Step, time_in_turn


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "name, tensors, millions",
    [("resnet50", 161, 25.557), ("bert-base", 199, 109.482), ("many-small", 1000, 2.6)],
)
def test_shapes_match_tensor_and_parameter_counts_of_models(name, tensors, millions):
    shapes = SHAPES[name]()
    assert len(shapes) == tensors
    # The published counts have three decimals; many-small is drawn about 2.56.
    tolerance = 0.1 if name == "many-small" else 0.0005
    assert parameters(shapes) / 1e6 == pytest.approx(millions, abs=tolerance)
    if name == "many-small":
        assert all(1024 <= math.prod(shape) <= 4096 for shape in shapes)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "inner, kind, options, bytes_each",
    [
        ("SGD", "float32", {}, 4 * (2 + 2)),
        ("SGD", "float32", {"checks": False}, 4 * (1 + 2)),
        ("SGD+momentum", "float32", {}, 4 * (2 + 2 + 2)),
        ("AdamW", "float32", {}, 4 * (2 + 2 + 4)),
        # The norm of the gradients is the check, that of the weights one more read.
        ("LARS", "float32", {}, 4 * (2 + 3 + 2)),
        ("LARS", "float32", {"checks": False}, 4 * (2 + 3 + 2)),
        # Two reads of the gradient and a write of the variable, all else in float32.
        ("Adam", "float16", {}, 2 * 3 + 4 * (2 + 4)),
        ("Adam", "float16", {"masters": False}, 2 * (2 + 2 + 4)),
        # Two bytes more of each weight, or none, and the slots in float32.
        ("Adam", "bfloat16", {"masters": "remainder"}, 2 * (2 + 2 + 2) + 4 * 4),
        ("SGD+momentum", "float16", {"masters": "remainder"}, 20),
        ("Adam", "bfloat16", {"masters": "stochastic"}, 2 * (2 + 2) + 4 * 4),
    ],
)
def test_bytes_of_step_match_hand_counted_bytes(inner, kind, options, bytes_each):
    expected = bytes_each * parameters(SHAPES["tiny"]())
    assert bytes_of_step("tiny", inner, kind, **options) == expected


@pytest.mark.one_backend
def test_benchmark_gradients_avoid_denormals_and_overflow():
    for gradient in make_data("tiny", "float16").gradients:
        assert np.abs(gradient).min() >= 0.5
        assert np.abs(gradient * 2.0**15).max() <= np.finfo("float16").max
        assert np.float16(0.5) ** 2 * np.float16(1 - 0.999) > np.finfo("float16").tiny


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "weight, slot, message",
    [
        (1.0, 1e-40, "denormal"),
        (1.0, np.nan, "not finite"),
        (None, 1.0, "did not change"),
    ],
)
def test_check_healthy_rejects_denormal_nonfinite_and_unchanged_values(
    weight, slot, message
):
    data = make_data("tiny", "float32")
    weights = data.weights if weight is None else [np.full(3, weight, "float32")]
    slots = [np.full(3, slot, "float32"), np.array(7)]
    step = Step(run=list, state=lambda: (weights, slots))
    with pytest.raises(RuntimeError, match=message):
        check_healthy("row", step, data)
    slots[0][:] = 1.0
    weights = [np.ones(3, "float32")]
    check_healthy("row", step, data)


def test_time_in_turn_interleaves_rows_and_omits_warm_up():
    calls = []

    def clock(name):
        calls.append(name)
        return len(calls)

    seconds = time_in_turn({n: lambda n=n: clock(n) for n in "abc"}, 5, warmup=2)
    assert all(sorted(calls[i : i + 3]) == list("abc") for i in range(0, 21, 3))
    assert [len(times) for times in seconds.values()] == [5, 5, 5]
    assert min(min(times) for times in seconds.values()) > 6


def make_result():
    """Ours takes 30 ms where the peers take 20 and 40, and the floor is 10."""
    names = {"inner": "inner alone", "keras": "Keras's wrapper", "ours": "keras_lso"}
    common = {"low_ms": 1.0, "high_ms": 99.0, "bytes": 10**8, "extra_bytes": None}
    rows = [
        {"name": names.get(role, name), "role": role, "ms": ms, "first_s": s, **common}
        for name, role, ms, s in (
            ("", "inner", 25.0, 1.0),
            ("", "keras", 60.0, 2.0),
            ("", "ours", 30.0, 4.0),
            ("GradScaler + fused", "peer", 20.0, 0.0),
            ("GradScaler + foreach", "peer", 40.0, 0.0),
        )
    ]
    group = {
        "mode": "eager",
        "shapes": "resnet50",
        "inner": "SGD+momentum",
        "kind": "float32",
        "tensors": 161,
        "parameters": 25_557_032,
        "bytes_per_s": {"copy": 1e10, "in place": 5e9},
        "rows": rows,
    }
    machine = {"processor": "A", "cores": 2, "memory_gib": 8, "gpu": None}
    machine |= {"system": "L", "python": "3", "keras_lso": "0", "kernels": "framework"}
    return {
        "backend": "torch",
        "machine": machine | {"packages": {"torch": "2"}, "date": "2026-01-01"},
        "rounds": 20,
        "left_out": [],
        "failed": [],
        "groups": [group],
        "compilations": [],
        "fit": [],
    }


def cells(text, *words):
    """Returns the cells of the one line of a Markdown table that has all words."""
    [line] = [x for x in text.splitlines() if all(f"| {w} |" in x for w in words)]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.one_backend
def test_report_contains_ratios_and_limits():
    text = markdown([make_result()])
    ratios = cells(text, "SGD+momentum", "keras_lso")[5:9]
    assert ratios == ["3.00", "1.20", "0.50", "1.50"]
    limit = cells(text, "torch eager", "GradScaler + fused")[4:]
    assert limit == ["1.00 x", "", "1.50 x", "NO"]
    first_step = cells(text, "first step above inner alone")[4:]
    assert first_step == ["2.0 s", "", "3.0 s", "NO"]


@pytest.fixture
def measured(tmp_path, capsys):
    """`measured(*parts)`: their results of tiny tensors, and what is printed."""

    def measure(*parts):
        path = tmp_path / "result.json"
        arguments = ["--smoke", "--kinds", "float16", "--modes", "eager", "jit"]
        arguments += ["graph", "--parts", *parts, "--out", str(path)]
        # It is 1 where a part has failed.
        assert main(arguments) == 0
        return json.loads(path.read_text()), capsys.readouterr().out

    return measure


def test_steps_and_compilations_parts_run_on_tiny_tensors(measured):
    result, printed = measured("steps", "compilations")
    [group] = result["groups"]
    roles = [row["role"] for row in group["rows"]]
    assert roles[:3] == ["inner", "keras", "ours"]
    assert all(row["ms"] > 0 and row["bytes"] > 0 for row in group["rows"])
    [compilations] = result["compilations"]
    # PyTorch's eager steps are not compiled.
    is_eager = keras.backend.backend() == "torch"
    assert compilations["compilations"] == (None if is_eager else 1)
    assert "keras_lso" in printed
    assert "…" not in printed


# XLA takes 20 seconds to compile the model, PyTorch none.
@pytest.mark.slow
@pytest.mark.default_backend("torch")
def test_fit_part_runs_on_small_model(measured):
    result, printed = measured("fit")
    [group] = result["fit"]
    assert [row["role"] for row in group["rows"]] == [
        *("inner", "keras", "ours", "monitored")
    ]
    assert all(row["ms"] > 0 for row in group["rows"])
    assert "digits CNN" in printed


@pytest.mark.one_backend
def test_many_small_model_has_twelve_layers_of_256_units():
    model, data, classes, batch = fit.MODELS["many small"]()
    assert [v.shape for v in model.trainable_variables] == 12 * [(256, 256), (256,)]
    assert (data.shape, batch) == ((16 * fit.BATCHES, 256), 16)
    assert classes.shape == (16 * fit.BATCHES,)
    assert classes.min() >= 0 and classes.max() < 256


@pytest.mark.one_backend
@pytest.mark.parametrize("ms, met", [(10.0, "yes"), (10.1, "NO")])
def test_report_shows_whether_many_small_layers_meet_time_limit(ms, met):
    rows = [
        {"name": name, "role": role, "ms": time, "low_ms": 1.0, "high_ms": 99.0}
        | {"first_s": 1.0}
        for name, role, time in (
            ("float32, no wrapper", "inner", 5.0),
            ("Keras's wrapper", "keras", 10.0),
            ("keras_lso", "ours", ms),
        )
    ]
    group = {"tensors": 24, "parameters": 789_504, "rows": rows}
    # Other models have no limit.
    groups = [group | {"model": model} for model in ("many small", "digits CNN")]
    limits, _ = markdown([make_result() | {"fit": groups}]).split("### fit, with Adam")
    found = cells(limits, "torch fit")
    assert found[1:] == [
        *("many small, mixed_float16", "Adam", "Keras's wrapper"),
        *("1.00 x", "", f"{ms / 10:.2f} x", met),
    ]


@pytest.mark.default_backend("torch")
def test_protected_part_measures_unprotected_and_protected_rows(measured):
    result, printed = measured("protected")
    [group] = result["protected"]
    assert [row["role"] for row in group["rows"]] == ["unprotected", "protected"]
    assert all(row["ms"] > 0 for row in group["rows"])
    assert "Protected statistics" in printed


@pytest.mark.one_backend
def test_report_shows_whether_protection_meets_cost_limit():
    for ms, met in ((10.2, "yes"), (10.21, "NO")):
        rows = [
            {"name": name, "role": role, "ms": time, "low_ms": 1.0, "high_ms": 99.0}
            for name, role, time in (
                ("keras_lso", "unprotected", 10.0),
                ("with protect_statistics", "protected", ms),
            )
        ]
        group = {"normalizations": 50, "rows": rows}
        text = markdown([make_result() | {"protected": [group]}])
        found = cells(text, "torch", "with protect_statistics")
        assert found[-3:] == [f"{ms / 10:.3f}", "1.02 x", met]


@pytest.mark.default_backend("torch")
def test_recorded_part_measures_rows_with_and_without_step_record(measured):
    result, printed = measured("recorded")
    [group] = result["recorded"]
    assert [row["role"] for row in group["rows"]] == [
        *("clipped", "clipped, recorded", "plain", "recorded")
    ]
    assert all(row["ms"] > 0 for row in group["rows"])
    assert "A record of steps" in printed


@pytest.mark.one_backend
def test_report_shows_whether_step_record_meets_cost_limit():
    for ms, met in ((10.2, "yes"), (10.21, "NO")):
        rows = [
            {"name": role, "role": role, "ms": time, "low_ms": 1.0, "high_ms": 99.0}
            for role, time in (
                ("clipped", 10.0),
                ("clipped, recorded", ms),
                ("plain", 5.0),
                ("recorded", 6.0),
            )
        ]
        group = {"batches": 200, "rows": rows}
        text = markdown([make_result() | {"recorded": [group]}])
        found = cells(text, "torch", "clipped, recorded")
        assert found[-3:] == [f"{ms / 10:.3f}", "1.02 x", met]
        # Without clipping there is no limit.
        assert cells(text, "torch", "recorded")[-3:] == ["1.200", "", ""]


@pytest.mark.default_backend("torch")
def test_masters_part_measures_time_and_bytes_per_weight(measured):
    result, printed = measured("masters")
    assert {group["dtype"] for group in result["masters"]} == {"bfloat16", "float16"}
    for group in result["masters"]:
        # SGD's momentum in float32, but without masters in the dtype of the weights.
        bytes_ = [row["bytes_a_weight"] for row in group["rows"]]
        np.testing.assert_allclose(bytes_, [4, 10, 8, 6], atol=0.2)
        assert all(row["ms"] > 0 for row in group["rows"])
    assert "Masters of 16-bit weights" in printed


@pytest.mark.one_backend
def test_report_shows_whether_remainders_meet_cost_limit():
    for ms, met in ((10.0, "yes"), (10.1, "NO")):
        told = {"low_ms": 1.0, "high_ms": 99.0, "extra_bytes": None}
        rows = [
            {"name": role, "role": role, "ms": time, "bytes_a_weight": 8.0, **told}
            for role, time in (("masters", 10.0), ("remainder", ms))
        ]
        group = {"mode": "eager", "dtype": "float16", "inner": "SGD", "rows": rows}
        text = markdown([make_result() | {"masters": [group]}])
        found = cells(text, "torch eager", "remainder")
        assert found[-5:] == [f"{ms / 10:.2f}", "8.0", "", "1.00 x", met]


# They are processes, or threads with devices of their own.
@pytest.mark.full
def test_participants_part_runs_two_participants_on_tiny_tensors(measured):
    result, printed = measured("participants")
    [participants] = result["participants"]
    assert participants["number"] == 2
    rows = [row for group in participants["groups"] for row in group["rows"]]
    assert {"inner", "keras", "ours"} <= {row["role"] for row in rows}
    assert all(row["ms"] > 0 for row in rows)
    for group in participants["groups"]:
        assert group["engine"] in printed
