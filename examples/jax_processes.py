"""Two JAX processes that train one model in float16, with `fit`.

python examples/jax_processes.py

The script starts two more processes of itself. On two machines, start it once on each,
with the address of the first machine. Each process trains on batches of its own. XLA
averages the gradients, and both processes skip a step in which one overflows.
"""

import os
import socket
import subprocess
import sys

PROCESSES = 2


def launch():
    """Starts the processes, waits for them, and prints what they have printed."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    command = [sys.executable, __file__, address]
    workers = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(PROCESSES)
    ]
    try:
        outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    if any(worker.returncode for worker in workers):
        sys.exit(f"A process has failed.\n{''.join(outputs)}")
    print(*outputs, sep="", end="")


def train(address, rank):
    """Is one of the processes."""
    os.environ["KERAS_BACKEND"] = "jax"
    import jax

    # --8<-- [start:start]
    # How processes on CPUs talk, which JAX 0.5 has to be told.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Before anything else is done with JAX.
    jax.distributed.initialize(address, num_processes=PROCESSES, process_id=rank)
    # --8<-- [end:start]

    import keras
    import numpy as np
    from keras import layers
    from sklearn.datasets import load_digits

    import keras_lso

    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    # --8<-- [start:distribution]
    # Each process has a device here. `auto_shard_dataset=False`: each brings a batch of
    # its own. Keras would split a `tf.data.Dataset` of whole batches automatically.
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(auto_shard_dataset=False)
    )
    # --8<-- [end:distribution]

    digits = load_digits()
    images = (digits.images / 16).astype("float32")[..., None]
    own = slice(rank, 1400, PROCESSES)

    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10, dtype="float32"),
        ]
    )
    optimizer = keras_lso.LossScaleOptimizer(
        keras.optimizers.Adam(0.002),
        # The defaults are 2**15 and 2000. This short run starts too high and grows
        # often, so that one can see the scale move.
        initial_scale=2.0**24,
        dynamic_growth_steps=50,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)

    def report(epoch, logs):
        if rank == 0:
            print(
                f"epoch {epoch + 1:2}: loss {logs['loss']:.3f}, "
                f"loss scale {optimizer.loss_scale:.0f}, "
                f"skipped steps {optimizer.skipped_steps}"
            )

    model.fit(
        images[own],
        digits.target[own],
        batch_size=50,
        epochs=8,
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=report)],
    )
    weights = np.concatenate([np.ravel(v.value) for v in model.trainable_variables])
    print(f"process {rank}: sum of its weights {weights.sum():.8f}")
    jax.distributed.shutdown()


if __name__ == "__main__":
    if sys.argv[1:]:
        train(sys.argv[1], int(sys.argv[2]))
    else:
        launch()
