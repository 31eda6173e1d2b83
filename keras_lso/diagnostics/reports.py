"""What the reports share: the paths of layers, trial runs of a model, and tables."""

import contextlib
import difflib
import io
import itertools
import re
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import keras
from keras import ops, tree
from rich.box import Box
from rich.console import Console
from rich.table import Table

from keras_lso._backend import backend
from keras_lso._backend.tensors import NARROW
from keras_lso._core.checks import refusal
from keras_lso._keras_internals.layers import (
    FOREIGN,
    autocast_to,
    children_of,
    dtype_policies_set,
    preserve_global_seed,
    unlisted_state_of,
)
from keras_lso._keras_internals.variables import layers_of

# `rich.box.SIMPLE_HEAD` with hyphens for its dashes, since a user may print a report,
# or write it to a file, in an encoding without dashes, such as cp1252.
_RULED = Box("    \n    \n -- \n" + "    \n" * 5, ascii=True)


# Why a layer around a module of PyTorch or a SavedModel stays as it is.
HAS_OWN_DTYPES = "its weights have dtypes of their own, to which no dtype policy casts"


def check_model(model: Any) -> None:
    """Raises an error unless `model` is a `keras.Model` without quantized layers."""
    if not isinstance(model, keras.Model):
        raise refusal("model", model, "be a keras.Model", TypeError)
    for layer in layers_of(model):
        if layer.quantization_mode is not None:
            raise ValueError(
                "`model` must not be quantized, since such weights are no floats. Take "
                f"the model from before `quantize`. Received: the layer {layer.name!r}"
            )


def computes_loss(model: keras.Model) -> bool:
    """Whether a model's class overrides `compute_loss`."""
    return type(model).compute_loss is not keras.Model.compute_loss


def is_float_tensor(value: Any) -> bool:
    """Whether a value is a tensor of floating-point numbers."""
    return ops.is_tensor(value) and keras.backend.is_float_dtype(value.dtype)


class LayerPaths:
    """The layers of a model, by path: each once, the model itself first.

    `aliases` are further paths of layers in several places, and `parents` the paths of
    the enclosing layers. Unlike Keras's `layer.path`, a path belongs to one layer.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self.layers: dict[str, keras.layers.Layer] = {model.name: model}
        self.aliases: dict[str, keras.layers.Layer] = {}
        self.parents: dict[str, str] = {}
        self._paths = {id(model): model.name}
        self._visit(model, model.name, "")

    def _visit(self, layer: keras.layers.Layer, parent: str, prefix: str) -> None:
        """Enters the layers inside a layer, whose paths begin with a prefix."""
        children = children_of(layer)
        count = Counter(child.name for child in children)
        number: Counter = Counter()
        for child in children:
            number[child.name] += 1
            path = prefix + child.name
            # In a subclassed model, sibling layers may have the same name.
            if count[child.name] > 1 or path in self.layers:
                path = f"{path}#{number[child.name]}"
            if id(child) in self._paths:
                self.aliases[path] = child
                continue
            self._paths[id(child)] = path
            self.layers[path] = child
            self.parents[path] = parent
            self._visit(child, path, f"{path}/")

    def path_of(self, layer: keras.layers.Layer) -> str | None:
        """Returns the path of a layer; None if it is not in the model."""
        return self._paths.get(id(layer))

    def inside(self, path: str) -> list[str]:
        """Returns the paths of a layer and of all layers inside it."""
        inside = {id(layer) for layer in layers_of(self.layers[path])}
        return [p for p, layer in self.layers.items() if id(layer) in inside]

    def foreign(self) -> list[str]:
        """Returns the paths of layers whose dtypes no dtype policy can change."""
        return [p for p, layer in self.layers.items() if isinstance(layer, FOREIGN)]

    def outermost(self, paths: Collection[str]) -> list[str]:
        """Returns those of the paths inside no other of them, in the model's order."""
        inside = {p for path in paths for p in self.inside(path) if p != path}
        return [path for path in self.layers if path in paths and path not in inside]

    def find(self, item: Any) -> str:
        """Returns the path of a layer, given the layer, its path or its name."""
        if not isinstance(item, str | keras.layers.Layer):
            requirement = "be a list of names, paths or layers"
            raise refusal("layers", item, requirement, TypeError)
        path = self.path_of({**self.aliases, **self.layers}.get(item, item))
        if path is not None:
            return path
        named = [path for path, layer in self.layers.items() if layer.name == item]
        if len(named) == 1:
            return named[0]
        if named:
            raise ValueError(
                f"`layers` must be unambiguous, but several layers are called {item!r}."
                f" Write one of the paths {named}, or pass the layer object."
            )
        name = getattr(item, "name", item)
        near = difflib.get_close_matches(name, self.layers, n=3, cutoff=0.4)
        raise ValueError(
            "`layers` must hold names, paths or layers of the model, which has no "
            f"{item!r}. Similar are: {near or list(self.layers)[:10]}"
        )


# --- Trial runs --------------------------------------------------------------------


def batches_of(
    model: keras.Model, x: Any, y: Any, sample_weight: Any, count: int = 1
) -> list[tuple[Any, Any, Any]]:
    """Returns the first batches of data that `fit` takes, and builds the model."""
    batches = tree.map_structure(
        lambda value: None if value is None else ops.convert_to_tensor(value),
        _batches(x, y, sample_weight, count),
    )
    for batch in batches:
        for value in tree.flatten(batch[0]):
            # An optional input may be None.
            shape = () if value is None else ops.shape(value)
            if shape[:1] == (0,):
                raise ValueError(
                    f"`x` must hold at least one example. Received: x of shape {shape}"
                )
    if not all(layer.built for layer in layers_of(model)):
        model(batches[0][0])
    return batches


def _batches(x: Any, y: Any, sample_weight: Any, count: int) -> list:
    """Returns the first batches, tuples as a train step has them."""
    is_data = isinstance(x, keras.utils.PyDataset) or (
        isinstance(x, Iterable)
        and not isinstance(x, list | tuple | dict)
        and not ops.is_tensor(x)
        and not hasattr(x, "__array__")
    )
    if not is_data:
        return [(x, y, sample_weight)]
    kind = type(x).__name__
    if y is not None or sample_weight is not None:
        raise ValueError(
            f"`y` and `sample_weight` must not be given if `x` is a {kind}: it yields "
            "them with the inputs."
        )
    data: Iterable[Any] = x
    if isinstance(x, keras.utils.PyDataset):
        # Unlike other data, it may be read beyond its end.
        indices = itertools.count() if x.num_batches is None else range(x.num_batches)
        data = (x[i] for i in indices)
    batches = list(itertools.islice(data, count))
    if not batches:
        raise ValueError(f"`x` must yield a batch, and this {kind} yields none.")
    return [keras.utils.unpack_x_y_sample_weight(batch) for batch in batches]


@contextlib.contextmanager
def in_float32(model: keras.Model) -> Iterator[None]:
    """Makes the layers compute in float32."""
    layers = [v for v in layers_of(model) if v.compute_dtype in NARROW]
    # Variables may be in float16.
    scope = autocast_to("float32") if layers else contextlib.nullcontext()
    with dtype_policies_set([(layer, "float32") for layer in layers]), scope:
        yield


@contextlib.contextmanager
def unchanged(model: keras.Model) -> Iterator[None]:
    """Restores the state that a pass changes: statistics, seeds, metrics, masks."""
    # In a scope of other dtype policies, Keras 3.12 would restore no float16 weights.
    unlisted = unlisted_state_of(layers_of(model))
    # Weights too, since a call of `SpectralNormalization` assigns its kernel.
    variables = [*model.variables, *model.metrics_variables, *unlisted]
    before = [ops.copy(v.value) for v in variables]
    with preserve_global_seed(), backend.host.preserve_random_state():
        try:
            yield
        finally:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
            known = {id(variable) for variable in variables}
            for metric in model.metrics:
                # `compute_loss` created it, one for each loss.
                if not all(id(v) in known for v in metric.variables):
                    metric.reset_state()
            for layer in layers_of(model):
                # Cells keep their masks after an error.
                if hasattr(layer, "reset_dropout_mask"):
                    layer.reset_dropout_mask()
                    layer.reset_recurrent_dropout_mask()


# --- Tables ------------------------------------------------------------------------


def _width() -> int:
    """Returns the number of characters in a line: a terminal's, or 80."""
    return max(80, shutil.get_terminal_size().columns)


def table_of(headings: Sequence[str], rows: Collection[Sequence[str]]) -> Any:
    """Returns a table: paths of layers, then columns of numbers."""
    table = Table(box=_RULED, pad_edge=False, collapse_padding=True)
    table.add_column("layer", overflow="fold")
    room = _width() - 2
    for i, heading in enumerate(headings, 1):
        table.add_column(heading, justify="right", no_wrap=True)
        texts = "\n".join([heading, *(row[i] for row in rows)])
        room -= max(map(len, texts.split("\n"))) + 2
    for row in rows:
        table.add_row(_broken(row[0], room), *row[1:])
    return table


def _broken(path: str, room: int) -> str:
    """Returns a path on lines that end after a word."""
    lines = [""]
    for word in re.findall("[^/_]*[/_]?", path):
        if lines[-1] and len(lines[-1] + word) > room:
            lines.append("")
        lines[-1] += word
    return "\n".join(lines)


def text_of(*renderables: Any) -> str:
    """Returns tables and lines as text, of which no line exceeds `_width`."""
    stream = io.StringIO()
    # In a notebook, rich would display the table instead of writing it to the stream,
    # and notebooks ask for colours, which do not belong into a text.
    console = Console(
        file=stream, width=_width(), force_jupyter=False, force_terminal=False
    )
    for renderable in renderables:
        console.print(renderable, highlight=False, markup=False)
    # The names of layers may come from the file of a stranger, with characters that
    # would move the cursor of a terminal.
    return "\n".join(
        "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line.rstrip())
        for line in stream.getvalue().splitlines()
    )


def scale_text(value: float) -> str:
    """Returns a power of two as `2**15`, any other scale in digits."""
    mantissa, exponent = float(value).hex().split("p")
    return f"2**{int(exponent)}" if mantissa == "0x1.0000000000000" else f"{value:.3g}"


def share_text(value: float) -> str:
    """Returns a share as a percentage."""
    return "" if value == 0 else "<0.1%" if value < 0.001 else f"{value:.1%}"
