"""Warnings that training goes wrong: no program that we show may raise one."""

MESSAGES = (
    "LossScaleOptimizer divides gradients by the loss scale, and no loss has been",
    "variables are bfloat16, and",
)
# For `pytest.mark.filterwarnings`.
AS_ERRORS = [f"error:.*{message}:UserWarning" for message in MESSAGES]
# For `PYTHONWARNINGS`, which takes the beginning of a message. Programs that programs
# start read it too, of which some show their errors alone.
ENVIRONMENT = {"PYTHONWARNINGS": f"error:{MESSAGES[0].split(',')[0]}:UserWarning"}


def check_output(errors):
    """Refuses the warnings in what a program has written to `stderr`."""
    found = [message for message in MESSAGES if message in errors]
    assert not found, errors
