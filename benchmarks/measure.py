"""Measures one backend, the one in KERAS_BACKEND: its groups of rows, and the rest."""

import importlib
import importlib.util
import time
import traceback
import warnings
from functools import partial

import keras

import keras_lso
from benchmarks import (
    first_step,
    fit,
    host,
    machine,
    masters,
    participants,
    protected,
    recorded,
)
from benchmarks.bytes_moved import bytes_of_step
from benchmarks.data import check_healthy, make_data
from benchmarks.inner import INNER
from benchmarks.plan import (
    Group,
    chosen_groups,
    default_groups,
    is_measured,
    masters_groups,
)
from benchmarks.shapes import SHAPES, parameters
from benchmarks.timing import summarize, time_in_turn

BACKEND = keras.backend.backend()
rows = importlib.import_module(f"benchmarks.rows_{BACKEND}")
_STREAM_MIB = 1024 if rows.gpu() else 256
_COMPILED = ("SGD+momentum", "Adam", "LARS")
_PEERS_NEED = {"torch": (), "jax": ("optax", "jmp"), "tensorflow": ("tf_keras",)}


def measure(options, tell):
    """Returns the results of one backend, ready for JSON.

    Args:
        options: What `__main__.parse_arguments` returns.
        tell: Called with a line of progress, and the share that is done.
    """
    if options.gpu and rows.gpu() is None:
        raise SystemExit(f"{BACKEND} sees no GPU, and --gpu asks for one.")
    # The rows are given gradients: no loss is scaled.
    warnings.filterwarnings("ignore", "LossScaleOptimizer divides gradients")
    tasks = _tasks(options)
    results = {
        "backend": BACKEND,
        "machine": machine.facts(BACKEND, rows.gpu()),
        "rounds": options.rounds,
        "left_out": _missing(),
        "failed": [],
        "groups": [],
        "masters": [],
        "compilations": [],
        "fit": [],
        "protected": [],
        "recorded": [],
        "participants": [],
        "host": [],
    }
    for number, (part, name, task) in enumerate(tasks):
        tell(f"{BACKEND}: {name}", number / len(tasks))
        try:
            results[part].append(task())
        except Exception:
            # The other parts are worth their time still.
            traceback.print_exc()
            results["failed"].append(name)
        rows.release()
    tell(f"{BACKEND}: done", 1.0)
    return results


def _tasks(options):
    """Returns what there is to do: part of the results, its name, and a function."""
    tasks = []
    for mode in options.modes or rows.MODES:
        if mode not in rows.MODES:
            continue
        if "steps" in options.parts:
            for group in _groups(options, mode):
                name = f"{mode}, {group.shapes} {group.kind}, {group.inner}"
                tasks.append(("groups", name, partial(_group, mode, group, options)))
        if "masters" in options.parts:
            tasks += _masters_tasks(options, mode)
        if "compilations" in options.parts:
            for inner in options.inner or _COMPILED:
                name = f"{mode}, compilations, {inner}"
                task = partial(first_step.count, rows, mode, inner)
                tasks.append(("compilations", name, task))
    if "fit" in options.parts:
        models = [m for m in fit.MODELS if fit.NEEDS.get(m) not in _missing()]
        for model in models[: 1 if options.smoke else None]:
            task = partial(fit.measure, model, options.rounds, options.smoke)
            tasks.append(("fit", f"fit, {model}", task))
    if "protected" in options.parts:
        task = partial(protected.measure, options.rounds, options.smoke)
        tasks.append(("protected", "fit, with protected statistics", task))
    if "recorded" in options.parts:
        task = partial(recorded.measure, options.rounds, options.smoke)
        tasks.append(("recorded", "fit, with a record of steps", task))
    # Two of them would need two GPUs.
    if "participants" in options.parts and rows.gpu() is None:
        shapes = "tiny" if options.smoke else "resnet50"
        inner = options.inner or participants.INNER
        task = partial(participants.measure, BACKEND, shapes, inner, options.rounds)
        tasks.append(("participants", "two participants", task))
    if "host" in options.parts:
        tasks += _host_tasks(options)
    return tasks


def _masters_tasks(options, mode):
    shapes = "tiny" if options.smoke else "resnet50"
    return [
        (
            "masters",
            f"{mode}, masters, {dtype}, {inner}",
            partial(masters.measure, rows, mode, dtype, inner, options.rounds, shapes),
        )
        for dtype, inner in masters_groups(BACKEND, options.inner)
    ]


def _host_tasks(options):
    """An eager step has the host decide each time; compiled ones have had it."""
    # On a GPU the clock is that of its queue.
    if "eager" not in rows.MODES or rows.gpu() is not None:
        return []
    peers = importlib.import_module(f"benchmarks.peers_{BACKEND}")
    tasks = []
    for shapes in ("tiny",) if options.smoke else host.SHAPES:
        for recipe in host.chosen_recipes(options.inner, options.kinds):
            task = partial(host.measure, rows, peers, recipe, shapes, options.rounds)
            tasks.append(("host", f"host, {shapes} {recipe.name}", task))
    return tasks


def _groups(options, mode):
    if not (options.shapes or options.inner or options.kinds):
        return default_groups(BACKEND, mode, rows.gpu() is not None)
    return chosen_groups(
        options.shapes or ("resnet50",),
        options.inner or ("SGD+momentum", "Adam"),
        options.kinds or ("float32",),
    )


def _missing():
    """Returns the packages whose rows are left out because they are not there."""
    needed = {*_PEERS_NEED[BACKEND], *fit.NEEDS.values()}
    return sorted(p for p in needed if importlib.util.find_spec(p) is None)


def _peers(mode, inner):
    if set(_PEERS_NEED[BACKEND]) & set(_missing()):
        return {}
    module = importlib.import_module(f"benchmarks.peers_{BACKEND}")
    return module.peers(mode, inner)


def _group(mode, group, options):
    """Measures the rows of a group in turn."""
    _warm_up(mode)
    data = make_data(group.shapes, group.kind)
    tensors = rows.Tensors(data)
    results, steps = [], {}
    for row, make in _makers(mode, group, tensors, options.slow_peers):
        start = time.perf_counter()
        step = make()
        if step is None:
            continue
        build_s = time.perf_counter() - start
        row["first_s"] = build_s + rows.first_seconds(step)
        results.append(row)
        steps[row["name"]] = step
    streams, stream_bytes = rows.stream_clocks(1 if options.smoke else _STREAM_MIB)
    clocks = {name: partial(rows.seconds, step) for name, step in steps.items()}
    seconds = time_in_turn({**clocks, **streams}, options.rounds)
    stream_ms = {name: summarize(seconds[name])["ms"] for name in streams}
    for row in results:
        step = steps[row["name"]]
        row |= summarize(seconds[row["name"]])
        row["extra_bytes"] = rows.extra_bytes(step)
        check_healthy(f"{BACKEND} {mode}, {group}, {row['name']}", step, data)
    return {
        "mode": mode,
        **vars(group),
        "tensors": len(data.weights),
        "parameters": parameters(SHAPES[group.shapes]()),
        "bytes_per_s": {n: stream_bytes / ms * 1e3 for n, ms in stream_ms.items()},
        "rows": results,
    }


def _makers(mode, group, tensors, slow_peers):
    """Yields each row with its name and bytes, and a function that makes its step.

    The role says what the row is to the others: `inner`, `keras`, `ours`, `peer`, or
    `more`. An optimizer that has no masters of its own trains float16 as it is.
    """
    make_inner = INNER[group.inner].make
    inner_name, keras_name = "inner alone", "Keras's wrapper"
    if group.kind == "float16":
        inner_name, keras_name = "inner alone, no masters", "Keras's, no masters"

    def row(name, role, **bytes_):
        moved = bytes_of_step(group.shapes, group.inner, group.kind, **bytes_)
        return {"name": name, "role": role, "bytes": moved}

    def keras_row(optimizer, scaled=True):
        variables = tensors.variables()
        return partial(rows.keras_step, mode, optimizer, variables, tensors, scaled)

    yield (
        row(inner_name, "inner", checks=False, masters=False),
        keras_row(make_inner(), scaled=False),
    )
    optimizer = keras.optimizers.LossScaleOptimizer(make_inner())
    yield row(keras_name, "keras", masters=False), keras_row(optimizer)
    optimizer = keras_lso.LossScaleOptimizer(make_inner())
    yield row("keras_lso", "ours"), keras_row(optimizer)
    if group == Group("resnet50", "SGD+momentum", "float32"):
        policy = keras_lso.loss_scales.LogMaxLossScale()
        optimizer = keras_lso.LossScaleOptimizer(make_inner(), loss_scale=policy)
        yield row("keras_lso, LogMax", "more"), keras_row(optimizer)
    if group == Group("resnet50", "Adam", "float32"):
        optimizer = keras_lso.GuardedOptimizer(make_inner())
        yield row("GuardedOptimizer", "more"), keras_row(optimizer, scaled=False)
    for name, make in rows.MORE_ROWS.items():
        yield row(name, "more"), partial(make, mode, make_inner, tensors)
    for name, make in _peers(mode, group.inner).items():
        if slow_peers or is_measured(name, group):
            yield row(name, "peer"), partial(make, tensors)


_warm = set()


def _warm_up(mode):
    """Takes what only the first step of a process costs off the first row."""
    if mode in _warm:
        return
    _warm.add(mode)
    tensors = rows.Tensors(make_data("tiny", "float32"))
    optimizer = INNER["SGD"].make()
    step = rows.keras_step(mode, optimizer, tensors.variables(), tensors, False)
    rows.first_seconds(step)
