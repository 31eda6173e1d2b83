"""The part "host": its recipes run, and the report says which limits they meet."""

import json

import keras
import numpy as np
import pytest

# A source distribution has no benchmarks.
pytest.importorskip("benchmarks")

from benchmarks.__main__ import main
from benchmarks.data import check_alike
from benchmarks.host import RECIPES, SHAPES, chosen_recipes
from benchmarks.limits import LIMITS
from benchmarks.report import RESULTS, markdown, read
from benchmarks.shapes import SHAPES as ALL_SHAPES
from benchmarks.timing import Step

ON_TORCH = keras.backend.backend() == "torch"


@pytest.mark.one_backend
def test_host_shapes_have_tensors_of_four_elements():
    assert [ALL_SHAPES[name]() for name in SHAPES] == [[(4,)] * 160, [(4,)] * 1000]


@pytest.mark.one_backend
def test_recipes_are_chosen_by_inner_optimizer_and_kind():
    assert chosen_recipes() == list(RECIPES)
    names = [recipe.name for recipe in chosen_recipes(["AdamW", "LARS"])]
    assert names == ["AdamW", "AdamW, clipped", "AdamW, clipped, of 4", "LARS"]
    [recipe] = chosen_recipes(kinds=["float16"])
    assert (recipe.inner, recipe.kind) == ("SGD+momentum", "float16")


@pytest.mark.one_backend
@pytest.mark.parametrize("shapes", SHAPES)
def test_host_limits_match_expected_limits_of_recipes(shapes):
    limits = {
        name: (limit.against, limit.at_most)
        for limit in LIMITS
        for name in limit.inner or ()
        if limit.shapes == shapes
    }
    fused = "GradScaler + fused", 1.0
    assert limits == {
        "SGD+momentum": fused,
        "AdamW": fused,
        "AdamW, clipped": fused,
        "AdamW, clipped, of 4": fused,
        "Lion": ("GradScaler + foreach RMSprop", 1.3),
        "RMSprop": ("GradScaler + foreach", 1.3),
        "Nadam": ("GradScaler + foreach", 1.3),
        "Adagrad": ("GradScaler + foreach", 1.3),
        # It has no rule: what the step takes beyond the optimizer's own.
        "Adadelta": ("inner", 1.15),
    }
    assert limits.keys() <= {recipe.name for recipe in RECIPES}


def make_group(inner, peer, ours_ms):
    """Ours beside a peer that takes 2 ms."""
    roles = {"inner alone": ("inner", 4.0), "Keras's wrapper": ("keras", 8.0)}
    roles |= {"keras_lso": ("ours", ours_ms), peer: ("peer", 2.0)}
    rows = [
        {"name": name, "role": role, "ms": ms, "low_ms": ms / 2, "high_ms": 2 * ms}
        for name, (role, ms) in roles.items()
    ]
    common = {"mode": "eager", "shapes": "1000-of-4", "tensors": 1000}
    return common | {"inner": inner, "kind": "float32", "rows": rows}


@pytest.mark.one_backend
def test_report_contains_microseconds_ratios_and_limits():
    [old] = read([RESULTS / "torch-amd-epyc-2-cores.json"])
    groups = [
        make_group("AdamW, clipped", "GradScaler + fused", 1.5),
        make_group("Lion", "GradScaler + foreach RMSprop", 3.0),
        make_group("LARS", "GradScaler + fused SGD", 3.0),
    ]
    limits, host = markdown([old | {"host": groups}]).split("### Host time")
    ours = [line for line in host.splitlines() if "| keras_lso |" in line]
    common = "| 1,000 |", "| keras_lso |"
    assert ours == [
        f"{common[0]} {inner} {common[1]} {rest} |"
        for inner, rest in (
            (
                "AdamW, clipped",
                "1500 | 750 to 3000 | 0.38 | 0.19 | 0.75 | 1.00 x | yes",
            ),
            ("Lion", "3000 | 1500 to 6000 | 0.75 | 0.38 | 1.50 | 1.30 x | NO"),
            ("LARS", "3000 | 1500 to 6000 | 0.75 | 0.38 | 1.50 |  | "),
        )
    ]
    found = [line for line in limits.splitlines() if "1000-of-4" in line]
    assert [line.rsplit("|", 3)[1:3] for line in found] == [
        [" 0.75 x ", " yes "],
        [" 1.50 x ", " NO "],
    ]


@pytest.mark.one_backend
def test_report_omits_host_table_without_host_results():
    result = read([RESULTS / "torch-amd-epyc-2-cores.json"])[0]
    result.pop("host", None)
    assert "Host time" not in markdown([result])


@pytest.mark.one_backend
def test_check_alike_rejects_rows_with_different_weights():
    weights = np.linspace(1.0, 2.0, 5, dtype="float32")
    moved = weights.copy()
    moved[3] += 0.01
    steps = {
        name: Step(run=list, state=lambda values=values: ([weights, values], []))
        for name, values in (("one", weights), ("two", weights), ("three", moved))
    }
    check_alike("group", steps, tolerance=6e-3)
    with pytest.raises(RuntimeError, match="group: .* one and three differ by 0.005"):
        check_alike("group", steps, tolerance=4e-3)
    moved[3] = np.nan
    with pytest.raises(RuntimeError, match="one and three"):
        check_alike("group", steps, tolerance=1.0)


def measure_host(path, *inner):
    arguments = ["--smoke", "--parts", "host", "--inner", *inner, "--out", str(path)]
    # It is 1 where a part has failed, and where rows with the same rule differ.
    assert main(arguments) == 0
    return json.loads(path.read_text())["host"]


@pytest.mark.slow
@pytest.mark.skipif(not ON_TORCH, reason="a step is compiled there")
def test_every_host_recipe_runs_on_tiny_tensors(tmp_path, capsys):
    import torch

    threads = torch.get_num_threads()
    inner = {recipe.inner for recipe in RECIPES}
    groups = measure_host(tmp_path / "result.json", *sorted(inner))
    assert torch.get_num_threads() == threads
    assert [group["inner"] for group in groups] == [recipe.name for recipe in RECIPES]
    peers = {}
    for group in groups:
        *ours, peer = group["rows"]
        assert [row["role"] for row in ours] == ["inner", "keras", "ours"]
        assert peer["role"] == "peer"
        assert all(row["ms"] > 0 for row in group["rows"])
        peers[group["inner"]] = peer["name"]
    assert peers == dict.fromkeys(peers, "GradScaler + fused") | {
        "Lion": "GradScaler + foreach RMSprop",
        "RMSprop": "GradScaler + foreach",
        "Nadam": "GradScaler + foreach",
        "Adagrad": "GradScaler + foreach",
        "Adadelta": "GradScaler + foreach",
        "LARS": "GradScaler + fused SGD",
    }
    printed = capsys.readouterr().out
    assert "Host time" in printed
    assert "…" not in printed


@pytest.mark.skipif(not ON_TORCH, reason="a step is compiled there")
@pytest.mark.parametrize("threads", [1, 2])
def test_one_thread_sets_single_thread_and_restores_thread_count(threads):
    import torch

    from benchmarks import rows_torch

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with pytest.raises(ZeroDivisionError), rows_torch.one_thread():
            assert torch.get_num_threads() == 1
            raise ZeroDivisionError
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(ON_TORCH, reason="a step is eager there")
def test_host_part_is_empty_on_compiled_backends(tmp_path):
    assert measure_host(tmp_path / "result.json", "SGD+momentum") == []
