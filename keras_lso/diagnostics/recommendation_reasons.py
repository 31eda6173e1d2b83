"""The reasons for a recommendation, as sentences."""

from keras_lso.diagnostics.float16 import Float16Report
from keras_lso.diagnostics.hardware import is_fast_in, policy_for
from keras_lso.diagnostics.underflow_counts import NOT_FINITE, all_finite


def of_weights(dtype: str, hardware: str) -> str:
    """Returns the reason why 16-bit weights keep their dtype."""
    masters = "Master weights keep the steps that 16 bits would round away."
    reason = f"The weights of the model are in {dtype}, and keep this dtype. {masters}"
    if is_fast_in(hardware, dtype):
        return reason
    _, other = policy_for(hardware)
    return f"{reason} The hardware is slow in {dtype}. {other}"


def of_report(report: Float16Report) -> list[str]:
    """Returns the reasons why layers stay in float32."""
    reasons = [
        f"{path}: {reason}."
        for path, found in report.layers.items()
        for reason in found.reasons
    ]
    if report.layers_to_keep:
        reasons.append(f"These stay in float32: {', '.join(report.layers_to_keep)}.")
    elif reasons:
        reasons.append(
            "No layer can be kept in float32 instead. Scale the inputs of the model, "
            "and move computations from outside its layers into a layer."
        )
    return reasons


def of_scale(report: Float16Report) -> str:
    """Returns the reason for the initial loss scale."""
    counts = [v.gradients for v in report.layers.values() if v.gradients]
    if report.recommended_scale is None:
        why = (
            "The gradients were not examined: the batch has no targets, or the model "
            "is not compiled with a loss."
        )
    elif not all_finite(counts):
        why = NOT_FINITE
    elif not any(found.values for found in counts):
        why = "The gradients in float16 are all 0."
    else:
        return (
            "The loss scale begins at half of the highest power of two at which no "
            "gradient of this batch overflows, within its bounds."
        )
    return f"{why} The loss scale begins at its default."
