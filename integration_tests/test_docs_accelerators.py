"""The tables of a step on a GPU or TPU equal the recorded results."""

import itertools

from benchmarks.accelerators import __main__ as accelerators
from integration_tests.docs_blocks import code_in, table_of

PAGE = "docs/benchmarks.md"
MOVED = accelerators.read(accelerators.RESULTS)
HELD = accelerators.read(accelerators.MEMORY)["rows"]
RECIPE = ("policy", "masters", "slots")


def test_table_of_moved_bytes_equals_recorded_results():
    recipes, cells = {}, {}
    for target, rows in MOVED.items():
        for row in rows:
            recipe = row["recipe"]
            if row["row"] == "keras_lso":
                recipes[recipe] = f"{row['least']:.1f}"
                cells[recipe, target] = f"{row['bytes']:.1f}"
            else:
                cells[recipe, target] += f" ({row['bytes']:.1f})"
    assert table_of(PAGE, "recipe") == [
        [recipe, *(cells.get((recipe, target), "") for target in MOVED), least]
        for recipe, least in recipes.items()
    ]


def test_table_of_held_bytes_equals_recorded_results():
    recipes, cells = {}, {}
    for target, rows in HELD.items():
        for row in rows:
            recipe = tuple(row[name] for name in RECIPE)
            both = [row["computed"], row["arguments"]]
            assert recipes.setdefault(recipe, both) == both
            cells[recipe, target] = [row["temporaries"], row["peak"]]
    expected = []
    for recipe, numbers in recipes.items():
        planned = [cells.get((recipe, target), ["", ""]) for target in HELD]
        numbers = [*numbers, *itertools.chain(*planned)]
        expected.append([*recipe, *(n and f"{n:.1f}" for n in numbers)])
    assert table_of(PAGE, "dtype policy") == expected


def test_computed_bytes_equal_those_of_kinds_of_masters():
    said = {}
    for policies, masters, *_, whole in table_of("docs/policies.md", "dtype policy"):
        [kind] = code_in(masters) or [masters]
        float32_slots, *bfloat16_slots = whole.rstrip(")").split(" (")
        for policy in code_in(policies):
            recipe = policy.strip('"'), kind.strip('"')
            said[*recipe, "float32"] = float(float32_slots)
            said[*recipe, "bfloat16"] = float(*bfloat16_slots or [float32_slots])
    for row in HELD["H200"]:
        policy, masters, slots = (row[name] for name in RECIPE)
        if policy != "bfloat16":
            masters = "any"
        elif "alone" in masters:
            masters = "False"
        assert round(row["computed"], 1) == said[policy, masters, slots]
