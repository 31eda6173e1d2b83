"""Float32 masters of low-precision variables: what the backends share."""

FLOAT16_MAX = 65504.0


def pairs_of(variables, low_precision_variables):
    """Returns the `(master, low-precision variable)` among `Framework.fused_step`'s.

    Args:
        variables: List of variables, some of which are masters.
        low_precision_variables: List with the variable of each master, and with None
            for what is no master; or None.
    """
    if not low_precision_variables:
        return []
    pairs = zip(variables, low_precision_variables, strict=True)
    return [(master, low) for master, low in pairs if low is not None]
