"""Warnings that training goes wrong. No program in the documentation may raise one."""

import contextlib
import warnings

MESSAGES = (
    "LossScaleOptimizer divides gradients by the loss scale, but no loss has been",
    "variables are bfloat16, and",
)
# For `pytest.mark.filterwarnings`.
AS_ERRORS = [f"error:.*{message}:UserWarning" for message in MESSAGES]
# For `PYTHONWARNINGS`, which takes the beginning of a message. Child processes read it
# too, and some programs show only the errors of theirs.
ENVIRONMENT = {"PYTHONWARNINGS": f"error:{MESSAGES[0].split(',')[0]}:UserWarning"}


@contextlib.contextmanager
def no_warnings():
    """Makes a warning to the user an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        # The tests train in float32 too.
        warnings.filterwarnings("ignore", ".* of a model without float16")
        yield


def check_output(errors):
    """Refuses these warnings in the `stderr` of a program."""
    unexpected = [message for message in MESSAGES if message in errors]
    assert not unexpected, errors
