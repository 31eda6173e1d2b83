"""The JSON of a recommendation: it comes back, or is refused with what is wrong."""

import json

import pytest

from keras_lso.diagnostics import Recommendation
from keras_lso.diagnostics.recommendation_table import bytes_text

pytestmark = pytest.mark.one_backend

COUNTS = {"weights": 1, "gradients": 2, "optimizer": 3, "outputs": 4}
FOUND = Recommendation(
    hardware="gpu:7.5",
    dtype_policy="mixed_float16",
    layers_in_float32=["front/ünits"],
    initial_scale=2.0**-3,
    master_weights=None,
    optimizer="LossScaleOptimizer",
    bytes=COUNTS,
    bytes_now={**COUNTS, "outputs": 8},
    reasons=["A sentence."],
)


def test_recommendation_round_trips_through_text_and_file(tmp_path):
    path = tmp_path / "found.json"
    text = FOUND.to_json(path)
    for source in (text, f"\n {text}", path, str(path)):
        assert Recommendation.from_json(source) == FOUND
    other = Recommendation("cpu", "float32", [], None, None, None, COUNTS, COUNTS, [])
    assert Recommendation.from_json(other.to_json()) == other


def test_from_json_reads_file_of_report_command(tmp_path):
    path = tmp_path / "precision.json"
    path.write_text(
        json.dumps({"recommendation": FOUND.to_dict(), "float16_report": 0})
    )
    assert Recommendation.from_json(path) == FOUND


WRONG = {
    "hardware": ["auto", "v100", None],
    "dtype_policy": ["mixed_float8", None, ["float32"]],
    "layers_in_float32": ["front", None, [1], {"front": 1}],
    "initial_scale": [0, -1.0, "2", True, float("nan"), float("inf"), 10**400],
    "master_weights": ["auto", True, []],
    "optimizer": ["Adam", "", {}],
    "bytes": [None, {}, {**COUNTS, "weights": -1}, {**COUNTS, "weights": 1.5}],
    "bytes_now": [[], {**COUNTS, "weights": True}, {**COUNTS, "more": 1}],
    "reasons": ["A sentence.", [None]],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key in WRONG for value in WRONG[key]]
)
def test_from_json_names_key_of_invalid_value(key, value, tmp_path):
    path = tmp_path / "found.json"
    path.write_text(json.dumps({**FOUND.to_dict(), key: value}))
    with pytest.raises(ValueError, match=f"'{key}' of a recomm.*{path}.*{key}="):
        Recommendation.from_json(path)


@pytest.mark.parametrize("changed", [{"initial_scale": None}, {"optimizer": None}])
def test_initial_scale_and_loss_scale_optimizer_require_each_other(changed):
    with pytest.raises(ValueError, match="'initial_scale' if its 'optimizer'"):
        Recommendation.from_json(json.dumps({**FOUND.to_dict(), **changed}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "must be a dict of the keys.*with list"),
        ("{}", r"must be a dict of the keys.*with \[\]"),
        ('{"hardware": "cpu"}', r"with \['hardware'\]"),
        ("{", "is not valid JSON"),
        ("", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"bytes": 1' + "0" * 5000, "is not valid JSON"),
    ],
)
def test_from_json_rejects_other_content(text, words, tmp_path):
    path = tmp_path / "found.json"
    path.write_text(text)
    with pytest.raises(
        ValueError, match=f"(?s){words}.*|.*found.json.*{words}"
    ) as error:
        Recommendation.from_json(path)
    assert str(path) in str(error.value)


def test_from_json_error_names_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.json"):
        Recommendation.from_json(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**60, "1048576.0 TiB"),
    ],
)
def test_bytes_text_uses_largest_unit(count, text):
    assert bytes_text(count) == text
