"""What `worker_torch_fsdp` trains, and `test_torch_fsdp` looks at."""

from integration_tests.distributed.problem import OPTIMIZERS, PATTERNS

CASES = {
    f"{optimizer}, {pattern}": (optimizer, pattern)
    for optimizer in OPTIMIZERS
    for pattern in PATTERNS
    if optimizer == "momentum" or pattern in ("first", "random")
}
