"""The tables, as text, from what `measure` returned. `report.py` prints them."""

from dataclasses import dataclass, field

from benchmarks.limits import (
    COMPILATIONS,
    FIRST_STEP_EXCESS_S,
    FIT,
    PROTECTION,
    RECORD,
    REMAINDERS,
    limits_of,
)


@dataclass
class Table:
    """A table of strings.

    Attributes:
        title: String.
        columns: List of headings, of one or two words.
        left: Int. How many columns, the first, hold words rather than numbers.
        sections: List of pairs: a heading, and a list of rows. The heading is a row
            too, or None.
        notes: List of strings, which stand below.
    """

    title: str
    columns: list
    left: int
    sections: list = field(default_factory=list)
    notes: list = field(default_factory=list)


def make_tables(results):
    """Returns all tables of some results, one result a backend."""
    tables = [
        steps_table(results),
        limits_table(results),
        masters_table(results),
        fit_table(results),
        protected_table(results),
        recorded_table(results),
        participants_table(results),
        host_table(results),
    ]
    return [table for table in tables if table.sections]


# --- Steps --------------------------------------------------------------------------


def steps_table(results):
    """Every row: how long it takes, beside what it must move and the other rows."""
    columns = ["inner", "row", "ms", "quartiles", "MB to move", "x floor", "x inner"]
    columns += ["x Keras", "x peer", "extra MB", "first s"]
    table = Table(
        "Steps", columns, left=2, notes=[*_machines(results), *_shapes(results)]
    )
    table.notes += [
        "x floor: compared with moving the step's bytes at the speed above, that of a "
        "plain copy or a pass in place, whichever was faster in the same rounds (not a "
        "strict bound: caches keep some of the bytes, all of many-small). x inner, x "
        "Keras, x peer: compared with the inner optimizer alone, Keras's wrapper, the "
        "fastest peer. extra MB: the most memory that the step needs for a while. "
        "first s: the time to build, trace, compile and run the first step.",
    ]
    for result in results:
        for group in result["groups"]:
            table.sections.append(_group_section(result, group))
    return table


def _group_section(result, group):
    speed = f"at {digits(_bandwidth(group) / 1e9)} GB/s"
    kind = "float16, masters" if group["kind"] == "float16" else group["kind"]
    heading = [f"{result['backend']} {group['mode']}", f"{group['shapes']}, {kind}"]
    heading += ["", speed, *[""] * 7]
    return heading, [_step_cells(row, group) for row in group["rows"]]


def _step_cells(row, group):
    extra = row["extra_bytes"]
    return [
        group["inner"],
        row["name"],
        digits(row["ms"]),
        f"{digits(row['low_ms'])} to {digits(row['high_ms'])}",
        digits(row["bytes"] / 1e6),
        *(_ratio(row, group, role) for role in ("floor", "inner", "keras", "peer")),
        "" if extra is None else digits(extra / 1e6),
        f"{row['first_s']:.1f}",
    ]


def ratio(row, group, against):
    """Returns the time of a row, in units of what a `Limit` is against, or None."""
    if against == "floor":
        return row["ms"] * 1e-3 / (row["bytes"] / _bandwidth(group))
    others = [r["ms"] for r in group["rows"] if against in (r["role"], r["name"])]
    return row["ms"] / min(others) if others else None


def _bandwidth(group):
    """Returns the bytes that the machine moves in a second, at its best."""
    return max(group["bytes_per_s"].values())


def _ratio(row, group, against):
    value = ratio(row, group, against)
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def digits(value):
    """Returns it with three digits: 0.123, 1.23, 12.3, 123, 1234."""
    if value == 0:
        return "0"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def _machines(results):
    """Returns a line for each machine, and for each backend's packages."""
    lines = []
    for result in results:
        m = result["machine"]
        packages = ", ".join(f"{k} {v}" for k, v in m["packages"].items())
        place = f"{m['gpu']}, {m['processor']}" if m["gpu"] else m["processor"]
        line = (
            f"{result['backend']}: {place}, {m['cores']} cores, {m['memory_gib']} GiB, "
            f"{m['system']}; Python {m['python']}, keras_lso {m['keras_lso']}, "
            f"{packages}; {m['date']}; medians of {result['rounds']} rounds"
        )
        if m["kernels"] != "framework":
            line += f"; KERAS_LSO_KERNELS={m['kernels']}"
        for package in result["left_out"]:
            line += f"; without what needs {package}, which is not installed"
        for name in result["failed"]:
            line += f"; FAILED: {name}"
        lines.append(f"{line}.")
    return lines


def _shapes(results):
    """Returns a line that says what the shapes are."""
    groups = [g for result in results for g in result["groups"]]
    found = {
        g["shapes"]: f"{g['shapes']}: {g['tensors']:,} tensors, "
        f"{g['parameters'] / 1e6:.3g} M parameters"
        for g in groups
    }
    return ["; ".join(found.values()) + "."] if found else []


# --- Limits -------------------------------------------------------------------------


def limits_table(results):
    """What is asked of our rows, and whether they meet it."""
    columns = ["backend", "tensors", "inner", "keras_lso against"]
    columns += ["at most", "aim", "measured", "met"]
    table = Table("Limits", columns, left=4)
    for result in results:
        rows = [*_ratio_limits(result), *_first_steps(result), *_compilations(result)]
        rows += _fit_limits(result)
        if rows:
            table.sections.append((None, rows))
    return table


def _ratio_limits(result):
    for group in [*result["groups"], *_host_groups(result)]:
        for limit in limits_of(result, group):
            [ours] = [r for r in group["rows"] if r["role"] == "ours"]
            value = ratio(ours, group, limit.against)
            if value is None:
                continue
            yield [
                f"{result['backend']} {group['mode']}",
                f"{group['shapes']}, {group['kind']}",
                group["inner"],
                {"inner": "inner alone", "peer": "fastest peer"}.get(
                    limit.against, limit.against
                ),
                f"{limit.at_most:.2f} x",
                f"{limit.aim:.2f} x" if limit.aim else "",
                f"{value:.2f} x",
                _met(value, limit.at_most),
            ]


def _first_steps(result):
    """The first step that costs most beyond the inner optimizer's, for each mode."""
    worst = {}
    for group in result["groups"]:
        by_role = {r["role"]: r["first_s"] for r in group["rows"]}
        excess = by_role["ours"] - by_role["inner"]
        if excess > worst.get(group["mode"], (float("-inf"),))[0]:
            worst[group["mode"]] = excess, group
    for mode, (excess, group) in worst.items():
        yield [
            f"{result['backend']} {mode}",
            f"{group['shapes']}, {group['kind']}",
            group["inner"],
            "first step above inner alone",
            f"{FIRST_STEP_EXCESS_S:.1f} s",
            "",
            f"{excess:.1f} s",
            _met(excess, FIRST_STEP_EXCESS_S),
        ]


def _compilations(result):
    for entry in result["compilations"]:
        count = entry["compilations"]
        if count is None:
            continue
        yield [
            f"{result['backend']} {entry['mode']}",
            "tiny, float32",
            entry["inner"],
            "number of compilations",
            str(COMPILATIONS),
            "",
            str(count),
            _met(count, COMPILATIONS),
        ]


def _fit_limits(result):
    for group in result["fit"]:
        if group["model"] not in FIT:
            continue
        [ours] = [r for r in group["rows"] if r["role"] == "ours"]
        value, at_most = ratio(ours, group, "keras"), FIT[group["model"]]
        yield [
            f"{result['backend']} fit",
            f"{group['model']}, mixed_float16",
            "Adam",
            "Keras's wrapper",
            f"{at_most:.2f} x",
            "",
            f"{value:.2f} x",
            _met(value, at_most),
        ]


def _met(value, at_most):
    return "yes" if value <= at_most else "NO"


# --- Fit ----------------------------------------------------------------------------


def fit_table(results):
    """The time that `fit` takes for a batch."""
    columns = ["backend", "model", "row", "ms a batch", "quartiles", "x float32"]
    columns += ["x Keras", "first epoch s"]
    table = Table("fit, with Adam", columns, left=3)
    table.notes = [
        "The float16 rows train under mixed_float16, the float32 rows without it. The "
        "monitor reads the scale and the skipped steps at the end of an epoch, which "
        "has five batches here."
    ]
    for result in results:
        for group in result["fit"]:
            table.sections.append(
                (None, [_fit_cells(result, group, r) for r in group["rows"]])
            )
    return table


def _fit_cells(result, group, row):
    return [
        result["backend"],
        group["model"],
        row["name"],
        digits(row["ms"]),
        f"{digits(row['low_ms'])} to {digits(row['high_ms'])}",
        _ratio(row, group, "inner"),
        _ratio(row, group, "keras"),
        f"{row['first_s']:.1f}",
    ]


def protected_table(results):
    """The time of a batch in `fit` with `protect_statistics`, and without."""
    columns = ["backend", "row", "ms a batch", "quartiles", "x unprotected"]
    columns += ["at most", "met"]
    table = Table("Protected statistics", columns, left=2)
    for result in results:
        # Results of an earlier version have none.
        for group in result.get("protected", []):
            rows = [_protected_cells(result, group, row) for row in group["rows"]]
            table.sections.append((None, rows))
            table.notes = [
                f"A convnet with {group['normalizations']} BatchNormalizations, in "
                "float32."
            ]
    return table


def _protected_cells(result, group, row):
    limit = PROTECTION if row["role"] == "protected" else None
    return _limited_cells(result, row, ratio(row, group, "unprotected"), limit)


def _limited_cells(result, row, value, limit):
    return [
        result["backend"],
        row["name"],
        digits(row["ms"]),
        f"{digits(row['low_ms'])} to {digits(row['high_ms'])}",
        f"{value:.3f}",
        "" if limit is None else f"{limit:.2f} x",
        "" if limit is None else _met(value, limit),
    ]


# By the role of a row, that of the row that it is held against.
_NOT_RECORDED = {"clipped, recorded": "clipped", "recorded": "plain"}


def recorded_table(results):
    """The time of a batch in `fit` with a `StepRecord`, and without."""
    columns = ["backend", "row", "ms a batch", "quartiles", "x not recorded"]
    columns += ["at most", "met"]
    table = Table("A record of steps", columns, left=2)
    for result in results:
        # Results of an earlier version have none.
        for group in result.get("recorded", []):
            rows = [_recorded_cells(result, group, row) for row in group["rows"]]
            table.sections.append((None, rows))
            table.notes = [
                "The many small layers of `fit`, in float32, with Adam. The record is "
                f"read at the end of an epoch of {group['batches']} batches."
            ]
    return table


def _recorded_cells(result, group, row):
    base = _NOT_RECORDED.get(row["role"], row["role"])
    limit = RECORD if row["role"] == "clipped, recorded" else None
    return _limited_cells(result, row, ratio(row, group, base), limit)


# --- Masters ------------------------------------------------------------------------


def masters_table(results):
    """The time of a step on weights of 16 bits, by what is kept with them."""
    columns = ["backend", "weights", "inner", "row", "ms", "x masters"]
    columns += ["bytes a weight", "extra MB", "first s", "at most", "met"]
    table = Table("Masters of 16-bit weights", columns, left=4)
    for result in results:
        # Results of an earlier version have none.
        for group in result.get("masters", []):
            rows = [_masters_cells(result, group, row) for row in group["rows"]]
            table.sections.append((None, rows))
    table.notes = [
        "Gradients in the dtype of the weights, of a ResNet-50. bytes a weight: those "
        "of the weight, of what is kept with it and of the slots, as variables hold "
        "them. extra MB: the most memory that a step needs for a while.",
    ]
    return table


def _masters_cells(result, group, row):
    value, extra = ratio(row, group, "masters"), row["extra_bytes"]
    is_limited = row["role"].startswith("remainder")
    # Results of an earlier version have none.
    first = row.get("first_s")
    return [
        f"{result['backend']} {group['mode']}",
        group["dtype"],
        group["inner"],
        row["name"],
        digits(row["ms"]),
        f"{value:.2f}",
        f"{row['bytes_a_weight']:.1f}",
        "" if extra is None else digits(extra / 1e6),
        "" if first is None else f"{first:.1f}",
        f"{REMAINDERS:.2f} x" if is_limited else "",
        _met(value, REMAINDERS) if is_limited else "",
    ]


# --- Participants -------------------------------------------------------------------


def participants_table(results):
    """The time of a step that two replicas, devices or processes make together."""
    columns = [
        "backend",
        "two",
        "inner",
        "row",
        "ms",
        "quartiles",
        "x inner",
        "x Keras",
        "x plain",
    ]
    table = Table("Two participants", columns, left=4)
    table.notes = [
        "The two share the cores of one machine. With MirroredStrategy, data parallel "
        "and DDP, adding the gradients up is a part of the step. x plain: compared "
        "with the same step on tensors that nobody shares."
    ]
    for result in results:
        # Results of an earlier version have none.
        for measured in result.get("participants", []):
            for group in measured["groups"]:
                rows = [_participants_cells(result, group, r) for r in group["rows"]]
                table.sections.append((None, rows))
    return table


def _participants_cells(result, group, row):
    return [
        result["backend"],
        group["engine"],
        group["inner"],
        row["name"],
        digits(row["ms"]),
        f"{digits(row['low_ms'])} to {digits(row['high_ms'])}",
        *(_ratio(row, group, role) for role in ("inner", "keras", "more")),
    ]


# --- The host -----------------------------------------------------------------------


def host_table(results):
    """The host's time of an eager step, in microseconds."""
    columns = ["tensors", "inner", "row", "us", "quartiles", "x inner", "x Keras"]
    columns += ["x peer", "at most", "met"]
    table = Table("Host time", columns, left=3)
    table.notes = [
        "The tensors have 4 elements and there is one thread: kernels cost next to "
        "nothing. clipped: by global_clipnorm, the peer by clip_grad_norm_. of 4: the "
        "time of one micro-batch, with the gradients of 4 micro-batches added up. "
        "PyTorch has no Lion and no LARS: there the peer is the rule that its name "
        "says."
    ]
    for result in results:
        for group in _host_groups(result):
            rows = [_host_cells(result, group, row) for row in group["rows"]]
            table.sections.append((None, rows))
    return table


def _host_groups(result):
    # Results of an earlier version have none.
    return result.get("host", [])


def _host_cells(result, group, row):
    limits = limits_of(result, group) if row["role"] == "ours" else []
    checked = [(ratio(row, group, limit.against), limit.at_most) for limit in limits]
    return [
        f"{group['tensors']:,}",
        group["inner"],
        row["name"],
        digits(row["ms"] * 1e3),
        f"{digits(row['low_ms'] * 1e3)} to {digits(row['high_ms'] * 1e3)}",
        *(_ratio(row, group, role) for role in ("inner", "keras", "peer")),
        " ".join(f"{at_most:.2f} x" for _, at_most in checked),
        " ".join(_met(*pair) for pair in checked),
    ]
