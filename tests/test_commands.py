"""The command `keras-lso`: what it prints, its exit status, its errors in one line."""

import io
import json
import os
import zipfile

import keras
import numpy as np
import pytest
from keras import layers

import keras_lso
from keras_lso import __main__ as command
from keras_lso.compat import untrusted_files
from keras_lso.compat.batch_files import read_batch
from keras_lso.diagnostics import Recommendation

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = X[:, :1]


def save_model(path, factor=1.0, optimizer="sgd"):
    """Saves a model that overflows in float16 at a factor of 1e6."""
    parts = [
        layers.Dense(8, "tanh", name="hidden"),
        layers.Rescaling(factor, name="scaled"),
        layers.LayerNormalization(name="norm"),
        layers.Dense(1, name="last"),
    ]
    model = keras.Sequential([keras.Input((4,)), *parts])
    if optimizer is not None:
        model.compile(optimizer, "mse")
    model.save(path)


def save_batch(path, **arrays):
    np.savez(path, **(arrays or {"x": X, "y": Y}))


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with a model that fits into float16, and a batch, to work in."""
    monkeypatch.chdir(tmp_path)
    keras.utils.set_random_seed(0)
    save_model("model.keras")
    save_batch("batch.npz")
    return tmp_path


@pytest.fixture
def run(capsys):
    """`run(*arguments)`: the exit status, and both outputs."""

    def call(*arguments):
        capsys.readouterr()
        status = command.main(arguments)
        return status, *capsys.readouterr()

    return call


def assert_is_refused(result, *words):
    status, out, err = result
    assert status == 2
    assert out == ""
    # What Keras warns of comes first.
    line = err.splitlines()[-1]
    assert line.startswith("keras-lso: error: ")
    assert "Traceback" not in err
    for word in words:
        assert word in line


# --- report -------------------------------------------------------------------------


@pytest.mark.in_turn("jax")
def test_report_returns_status_0_if_model_fits(files, run):
    status, out, err = run(
        "report", "model.keras", "batch.npz", "--hardware", "gpu:7.5"
    )
    assert status == 0
    assert "Every layer fits into float16." in out
    assert "Safe for all layers" in out
    assert "dtype policy       mixed_float16" in out
    # A bar is for terminals.
    assert "recommendation" not in err


@pytest.mark.in_turn("torch")
@pytest.mark.parametrize("hardware", ["gpu:7.5", "auto"])
@pytest.mark.parametrize("name", ["model.keras", "model.h5"])
def test_report_returns_status_1_if_model_overflows(hardware, name, files, run):
    save_model(name, factor=1e6)
    arguments = "report", name, "batch.npz", "--hardware", hardware
    status, out, _ = run(*arguments, "--json", "precision.json")
    # On any hardware: it is what float16 would do.
    assert status == 1
    assert "Keep in float32, or in bfloat16: scaled, norm." in out
    written = json.loads((files / "precision.json").read_text())
    assert written.keys() == {"recommendation", "float16_report", "underflow_report"}
    assert written["float16_report"]["layers_to_keep"] == ["scaled", "norm"]
    assert written["underflow_report"]["layers"].keys() >= {"hidden", "last"}
    found = Recommendation.from_json("precision.json")
    is_cpu = hardware == "auto"
    assert found.hardware == ("cpu" if is_cpu else "gpu:7.5")
    assert found.layers_in_float32 == ([] if is_cpu else ["scaled", "norm"])
    applied = found.apply(keras_lso.load_model(name))
    assert applied.layers[1].compute_dtype == "float32"


@pytest.mark.in_turn("tensorflow")
def test_report_returns_status_1_for_non_finite_inputs(files, run):
    save_batch("nan.npz", x=X * np.nan, y=Y)
    status, out, _ = run("report", "model.keras", "nan.npz", "--json", "found.json")
    assert status == 1
    assert "Nothing fails only in float16." in out
    # JSON itself has no such numbers, and other readers refuse them.
    text = (files / "found.json").read_text()
    assert '"nan"' in text

    def refuse(constant):
        raise AssertionError(constant)

    json.loads(text, parse_constant=refuse)


@pytest.mark.in_turn("jax")
def test_report_returns_status_1_for_non_finite_gradients(files, run):
    save_batch("nan.npz", x=X, y=Y * np.nan)
    status, out, _ = run("report", "model.keras", "nan.npz")
    assert status == 1
    assert "The gradients contain inf or NaN in float32 already" in out
    assert "Recommended initial_scale" not in out


@pytest.mark.in_turn("torch")
@pytest.mark.parametrize("hardware", ["cpu", "gpu:7.5"])
def test_report_rejects_batch_without_examples(hardware, files, run):
    save_batch("none.npz", x=X[:0], y=Y[:0])
    result = run("report", "model.keras", "none.npz", "--hardware", hardware)
    assert_is_refused(result, "'none.npz'", "`x` must hold at least one example")


@pytest.mark.in_turn("jax")
def test_report_mentions_missing_gradients(files, run):
    save_model("bare.keras", optimizer=None)
    save_batch("inputs.npz", x=X)
    for model, batch in (("bare.keras", "batch.npz"), ("model.keras", "inputs.npz")):
        status, out, _ = run("report", model, batch, "--json", "found.json")
        assert status == 0
        assert "There are no gradients: the model is not compiled" in out
        written = json.loads((files / "found.json").read_text())
        assert written["underflow_report"] is None


@pytest.mark.in_turn("torch")
def test_report_accepts_named_inputs_and_sample_weights(files, run):
    left, right = keras.Input((4,), name="left"), keras.Input((2,), name="right")
    joined = layers.Concatenate()([left, layers.Dense(2)(right)])
    outputs = {n: layers.Dense(1, name=n)(joined) for n in ("a", "b")}
    model = keras.Model({"left": left, "right": right}, outputs)
    model.compile("sgd", {"a": "mse", "b": "mse"})
    model.save("two.keras")
    batch = {"x_left": X, "x_right": X[:, :2], "y_a": Y, "y_b": Y}
    scales = []
    for weight in (1.0, 2.0**-6):
        weights = np.full(8, weight)
        save_batch("two.npz", **batch, sample_weight=weights)
        assert run("report", "two.keras", "two.npz", "--json", "found.json")[0] == 0
        written = json.loads((files / "found.json").read_text())
        scales.append(written["underflow_report"]["initial_scale"])
    assert scales[1] == scales[0] * 2**6


@pytest.mark.in_turn("jax")
def test_report_shows_progress_bar_on_terminal(files, run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, out, err = run("report", "model.keras", "batch.npz")
    assert "recommendation" in err
    assert "\x1b" not in out


@pytest.mark.in_turn("tensorflow")
def test_report_errors_name_file(files, run):
    assert_is_refused(
        run("report", "none.keras", "batch.npz"), "'none.keras'", "No such"
    )
    assert_is_refused(run("report", "model.keras", "none.npz"), "'none.npz'", "No such")
    assert_is_refused(run("report", "batch.npz", "batch.npz"), "'batch.npz'", ".keras")
    (files / "model.weights.h5").write_text("")
    assert_is_refused(run("report", "model.weights.h5", "batch.npz"), "a whole model")
    data = (files / "model.keras").read_bytes()
    (files / "cut.keras").write_bytes(data[:1000])
    assert_is_refused(run("report", "cut.keras", "batch.npz"), "'cut.keras'")
    save_batch("wide.npz", x=X[:, :2], y=Y)
    assert_is_refused(
        run("report", "model.keras", "wide.npz"), "'model.keras'", "'wide.npz'"
    )
    result = run("report", "model.keras", "batch.npz", "--json", "none/found.json")
    assert result[0] == 2 and "none/found.json" in result[2]
    # What was computed is not lost.
    assert "Every layer fits" in result[1]


@pytest.mark.in_turn("jax")
def test_report_rejects_model_that_contains_code(files, run):
    model = keras.Sequential([keras.Input((4,)), layers.Lambda(lambda x: x + 1)])
    model.save("lambda.keras")
    assert_is_refused(
        run("report", "lambda.keras", "batch.npz"), "'lambda.keras'", "safe_mode"
    )
    with zipfile.ZipFile("model.keras") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    (files / "evil.py").write_text("open('made', 'w')")
    config = json.loads(members["config.json"])
    config["config"]["layers"][1] |= {"module": "evil", "class_name": "Evil"}
    members["config.json"] = json.dumps(config).encode()
    with zipfile.ZipFile("evil.keras", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    assert_is_refused(run("report", "evil.keras", "batch.npz"), "'evil.keras'")
    assert not (files / "made").exists()


@pytest.mark.one_backend
@pytest.mark.parametrize("hardware", ["v100", "gpu", ""])
def test_report_rejects_invalid_hardware_before_reading_files(hardware, run):
    result = run("report", "none.keras", "none.npz", "--hardware", hardware)
    assert_is_refused(result, "`hardware` must be 'auto', 'cpu', 'tpu' or 'gpu:7.5'")


@pytest.mark.in_turn("torch")
def test_report_escapes_control_characters_in_names(files, run):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1, name="a\x1b[2Jb")])
    model.compile("sgd", "mse")
    model.save("evil.keras")
    status, out, _ = run("report", "evil.keras", "batch.npz")
    assert status == 0
    assert r"a\x1b[2Jb" in out and "\x1b" not in out


# --- The encoding of the output -----------------------------------------------------


@pytest.fixture
def encoded(monkeypatch):
    """`encoded(encoding)`: a stream of bytes, the standard output in that encoding."""

    def replace(encoding, errors="strict"):
        stream = io.BytesIO()
        output = io.TextIOWrapper(stream, encoding, errors, write_through=True)
        monkeypatch.setattr("sys.stdout", output)
        return stream

    return replace


# Windows uses cp1252 for output to a file, and a container without a locale ASCII.
@pytest.mark.in_turn
@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_report_prints_on_output_that_is_not_unicode(encoding, files, encoded):
    stream = encoded(encoding)
    arguments = "report", "model.keras", "batch.npz", "--hardware", "gpu:7.5"
    assert command.main([*arguments, "--json", "found.json"]) == 0
    out = stream.getvalue().decode(encoding)
    assert "Every layer fits into float16." in out
    assert "\n -----" in out
    assert json.loads((files / "found.json").read_text())["underflow_report"]


@pytest.mark.in_turn("jax")
def test_report_is_ascii_if_names_are(files):
    x = np.ones((8, 4), "float32")
    model = keras_lso.load_model("model.keras")
    for found in (
        keras_lso.float16_report(model, x, x[:, :1]),
        keras_lso.underflow_report(model, x, x[:, :1]),
        keras_lso.recommend(model, x, x[:, :1], hardware="gpu:7.5"),
    ):
        assert str(found).isascii()


@pytest.mark.one_backend
def test_show_escapes_characters_that_encoding_lacks(files, encoded, capsys):
    (files / "model.keras").rename("modèle 日本.keras")
    stream = encoded("cp1252")
    assert command.main(["show", "modèle 日本.keras"]) == 0
    out = stream.getvalue().decode("cp1252")
    assert r"modèle \u65e5\u672c.keras, model" in out
    assert capsys.readouterr().err == ""


@pytest.mark.one_backend
def test_command_leaves_error_handler_of_user(files, encoded):
    (files / "model.keras").rename("modèle.keras")
    stream = encoded("ascii", "replace")
    assert command.main(["show", "modèle.keras"]) == 0
    assert b"mod?le.keras, model" in stream.getvalue()


@pytest.mark.one_backend
def test_info_prints_on_ascii_output(encoded):
    stream = encoded("ascii")
    assert command.main(["info"]) == 0
    assert b"inner optimizer" in stream.getvalue()


@pytest.mark.one_backend
def test_command_ends_silently_if_reader_of_output_closes_pipe(
    files, monkeypatch, capsys
):
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as output:
        monkeypatch.setattr("sys.stdout", output)
        assert command.main(["show", "model.keras"]) == 1
    assert capsys.readouterr().err == ""


# --- The batch ----------------------------------------------------------------------


@pytest.mark.one_backend
def test_read_batch_casts_numbers_as_fit_does(tmp_path):
    path = tmp_path / "batch.npz"
    tokens = np.arange(8)
    save_batch(path, x=X.astype("float64"), y=tokens, sample_weight=np.ones(8))
    x, y, sample_weight = read_batch(path)
    assert (x.dtype, y.dtype, sample_weight.dtype) == ("float32", "int64", "float32")
    np.testing.assert_array_equal(x, X)
    save_batch(path, x_a=X, x_b_c=Y)
    x, y, sample_weight = read_batch(path)
    assert x.keys() == {"a", "b_c"} and y is sample_weight is None


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"y": Y}, r"It holds \['y'\]"),
        ({"inputs": X}, "It must hold `x`, `y`"),
        ({"x": X, "x_a": X}, "`x` or arrays `x_NAME`, not both"),
        ({"x": X, "y": Y, "y_a": Y}, "`y` or arrays `y_NAME`, not both"),
        ({"x_": X}, "It must hold"),
        ({"x": X, "weights": Y}, "It must hold"),
        ({"x": np.array([{}, []], object)}, "'x.npy' holds Python objects"),
    ],
)
def test_read_batch_rejects_unexpected_arrays(arrays, words, tmp_path):
    path = tmp_path / "batch.npz"
    save_batch(path, **arrays)
    with pytest.raises(ValueError, match=f"{path}.*{words}"):
        read_batch(path)


class Pickled:
    """Makes a file when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("made",)


@pytest.mark.one_backend
def test_read_batch_never_unpickles_objects(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    objects = np.array([Pickled()], object)
    np.savez("objects.npz", x=objects)
    np.save("objects.npy", objects)
    (tmp_path / "objects.npy").rename("plain.npz")
    for name in ("objects.npz", "plain.npz"):
        with pytest.raises(ValueError, match=name):
            read_batch(name)
    assert not (tmp_path / "made").exists()


def header_of(shape):
    stream = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    return stream.getvalue()


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("member", "words"),
    [
        (header_of((2**40,)) + bytes(8), "'x.npy' is damaged.*4398046511104"),
        (header_of((4,)) + bytes(8), "'x.npy' is damaged"),
        (b"\x93NUMPY\x09\x00" + bytes(100), "'x.npy' has an unknown version"),
        (b"text", "'x.npy' is not a NumPy array"),
        (b"", "'x.npy' is not a NumPy array"),
        (b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535, "'x.npy' is not a NumPy array"),
    ],
)
def test_read_batch_rejects_damaged_arrays(member, words, tmp_path):
    path = tmp_path / "batch.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", member)
    with pytest.raises(ValueError, match=f"{path}.*{words}"):
        read_batch(path)


@pytest.mark.one_backend
def test_read_batch_rejects_decompression_bomb(tmp_path, monkeypatch):
    monkeypatch.setattr(untrusted_files, "_LARGE", 2**20)
    path = tmp_path / "batch.npz"
    np.savez_compressed(path, x=np.zeros(2**20, "float32"))
    with pytest.raises(ValueError, match=f"{path}.*'x.npy'.*once unpacked"):
        read_batch(path)


@pytest.mark.one_backend
def test_read_batch_rejects_missing_file_and_other_formats(tmp_path):
    (tmp_path / "batch.npz").write_text("text")
    with pytest.raises(ValueError, match="batch.npz.*not a `.npz` file"):
        read_batch(tmp_path / "batch.npz")
    with pytest.raises(FileNotFoundError, match="none.npz"):
        read_batch(tmp_path / "none.npz")


# --- show, and the rest -------------------------------------------------------------


@pytest.mark.in_turn("torch")
def test_show_prints_text_or_json(files, run):
    status, out, _ = run("show", "model.keras")
    assert status == 0
    assert "file            model.keras, model" in out
    assert "keras.optimizers.SGD" in out
    status, out, _ = run("show", "model.keras", "--json")
    assert status == 0
    assert json.loads(out)["optimizer"]["name"] == "keras.optimizers.SGD"


@pytest.mark.one_backend
def test_show_errors_name_file_in_one_line(tmp_path, run):
    assert_is_refused(run("show", str(tmp_path / "none.keras")), "none.keras")
    assert_is_refused(run("show", str(tmp_path)), str(tmp_path))
    path = tmp_path / "model.keras"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("evil\x1b[2J\nline", "")
    assert_is_refused(run("show", str(path)), str(path), "config.json")
    assert "\x1b" not in run("show", str(path))[2]


@pytest.mark.one_backend
def test_help_lists_exit_statuses(capsys):
    for arguments in (["--help"], ["report", "--help"]):
        with pytest.raises(SystemExit, match="0"):
            command.main(arguments)
        out = capsys.readouterr().out
        assert out.startswith("usage: keras-lso")
        for status in "012":
            assert f"\n  {status}  " in out


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "arguments", [[], ["inform"], ["show"], ["report", "model.keras"], ["info", "all"]]
)
def test_invalid_command_line_exits_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    assert capsys.readouterr().err.startswith("usage: keras-lso")
