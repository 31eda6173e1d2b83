"""The text that `keras-lso show` prints about a saved file.

It is apart from `saved_files.py` because it imports rich, which takes a while.
"""

from typing import TYPE_CHECKING

from keras_lso.diagnostics.recommendation_table import bytes_text
from keras_lso.diagnostics.tables import printable, scale_text, text_of

if TYPE_CHECKING:
    from keras_lso.compat.saved_files import SavedFile


def text_of_file(found: "SavedFile") -> str:
    """Returns the text of a `SavedFile`."""
    rows = {"file": f"{found.path}, {found.kind}"}
    if found.model is not None:
        rows["model"] = found.model
    if found.dtype_policies is not None:
        rows["dtype policies"] = _counted(found.dtype_policies) or "none"
    weights = (
        f"{counts['number']} {dtype} ({bytes_text(counts['bytes'])})"
        for dtype, counts in found.weights.items()
    )
    rows["weights"] = ", ".join(weights) or "none"
    rows |= _optimizer(found.optimizer)
    width = max(map(len, rows)) + 2
    lines = [f"{name:<{width}}{printable(value)}" for name, value in rows.items()]
    return text_of(*lines)


def _optimizer(found):
    """Returns the rows of an optimizer."""
    if found is None:
        return {"optimizer": "none"}
    rows = {"optimizer": found.name or "unknown: the file does not name the class"}
    if found.inner_optimizer is not None:
        rows["inner optimizer"] = found.inner_optimizer
    if found.learning_rate is not None:
        rows["learning rate"] = _number(found.learning_rate)
    rows["state"] = f"{found.variables} variables ({bytes_text(found.bytes)})"
    if found.policy is not None:
        config = (found.policy_config or {}).items()
        arguments = ", ".join(f"{key}={_number(value)}" for key, value in config)
        rows["loss scale policy"] = f"{found.policy}({arguments})"
    if found.loss_scale is not None:
        rows["loss scale"] = _scale(found.loss_scale)
    counters = {
        "applied steps": found.applied_steps,
        "skipped steps": found.skipped_steps,
        "at this scale": found.step_counter,
    }
    rows |= {name: str(value) for name, value in counters.items() if value is not None}
    if found.masters is not None:
        rows["masters"] = _masters(**found.masters)
    return rows


def _masters(kind, number, bytes):
    named = f", master_weights={kind!r}" if kind else ""
    count = f"of {number} weights ({bytes_text(bytes)})" if number else "none"
    return f"{count}{named}"


def _counted(policies):
    return ", ".join(
        f"{name}: {count} layer{'' if count == 1 else 's'}"
        for name, count in policies.items()
    )


def _scale(value):
    is_scale = isinstance(value, float) and 0 < value < float("inf")
    return scale_text(value) if is_scale else str(value)


def _number(value):
    return f"{value:.6g}" if isinstance(value, float) else str(value)
