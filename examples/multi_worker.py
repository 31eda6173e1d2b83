"""Trains in float16 on two processes, in step, with the loss scaled by keras_lso.

python examples/multi_worker.py

It starts both, on this machine. On a cluster, set TF_CONFIG on each machine as
`start_workers` does here, and start `python examples/multi_worker.py` there.
"""

import hashlib
import json
import os
import socket
import subprocess
import sys

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
BATCH_SIZE = 128  # Both workers together.


def start_workers():
    with socket.create_server(("", 0)) as a, socket.create_server(("", 0)) as b:
        addresses = [f"localhost:{s.getsockname()[1]}" for s in (a, b)]
    workers = []
    for index in range(2):
        task = {"type": "worker", "index": index}
        config = json.dumps({"cluster": {"worker": addresses}, "task": task})
        environment = {**os.environ, "TF_CONFIG": config}
        workers.append(subprocess.Popen([sys.executable, __file__], env=environment))
    try:
        sys.exit(any(worker.wait() for worker in workers))
    finally:
        for worker in workers:
            worker.kill()


def train():
    # Each line in one piece: the workers write to the same place.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    import keras
    import tensorflow as tf
    from sklearn.datasets import load_digits

    import keras_lso

    # This comes first, because the processes connect here.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank = strategy.cluster_resolver.task_id
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")

    digits = load_digits()
    images, labels = (digits.data / 16).astype("float32"), digits.target
    data = tf.data.Dataset.from_tensor_slices((images[:1400], labels[:1400]))
    data = data.shuffle(1400, seed=0).batch(BATCH_SIZE, drop_remainder=True)
    # Each worker gets its share of each batch.
    data = strategy.experimental_distribute_dataset(data)

    # --8<-- [start:step]
    # Each worker gets a copy of everything that is created here.
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dense(10, dtype="float32"),
            ]
        )
        optimizer = keras_lso.LossScaleOptimizer(
            keras.optimizers.Adam(0.002),
            initial_scale=2.0**24,  # Too high, so that one can see it move.
            dynamic_growth_steps=30,
        )
        optimizer.build(model.trainable_variables)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(True, reduction=None)

    def step_of_worker(x, y):
        with tf.GradientTape() as tape:
            # The workers' gradients are added up: divide by what all have together.
            loss = tf.reduce_sum(loss_fn(y, model(x, training=True))) / BATCH_SIZE
            scaled_loss = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled_loss, model.trainable_variables)
        # Adds them up, and skips the step on all workers if one has overflowed.
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def train_step(x, y):
        losses = strategy.run(step_of_worker, args=(x, y))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    # --8<-- [end:step]

    for epoch in range(10):
        for x, y in data:
            loss = train_step(x, y)
        # These read from the device: now and then, not at every step.
        optimizer.check_stalled()
        if rank == 0:
            print(
                f"epoch {epoch + 1:2}: loss {loss:.3f}, "
                f"loss scale {optimizer.loss_scale:.0f}, "
                f"skipped steps {optimizer.skipped_steps}"
            )

    predicted = tf.argmax(model(images[1400:]), axis=-1)
    accuracy = tf.reduce_mean(tf.cast(predicted == labels[1400:], tf.float32))
    digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights()))
    print(f"worker {rank}: accuracy {accuracy:.3f}, weights {digest.hexdigest()[:16]}")


if __name__ == "__main__":
    train() if "TF_CONFIG" in os.environ else start_workers()
