"""What the workers train on, and `test_processes.py` expects of them."""

# For each call of the training op a batch for each process. Two calls are an update;
# in the second pair one batch overflows, on one process.
INF = float("inf")
BATCHES = [
    [[1.0, 0.0], [3.0, 2.0]],
    [[2.0, 4.0], [2.0, 2.0]],
    [[1.0, 1.0], [INF, 1.0]],
    [[1.0, 1.0], [1.0, 1.0]],
    [[4.0, 0.0], [0.0, 4.0]],
    [[0.0, 0.0], [0.0, 4.0]],
]
