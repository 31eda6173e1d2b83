"""How many steps a large network skips before it trains in float16.

`KERAS_BACKEND=jax python -m benchmarks.initial_scale [NETWORK ...]`: networks of
`keras.applications` without weights, under mixed_float16, on random pictures of 64 by
64. The scale that each needs is what it ends at. It takes minutes a network, most of
them to compile it.
"""

import argparse

import keras
import numpy as np
import rich
import rich.table

import keras_lso

NETWORKS = ("EfficientNetB0", "ResNet50", "MobileNetV3Small")
POLICIES = {"halving, as Keras's class": None, 'initial_scale="auto"': "auto"}
STEPS, BATCH_SIZE, CLASSES = 16, 8, 10


def scales_of(network, initial_scale):
    """Returns the loss scale after each step, and the number of steps skipped."""
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    x = random.uniform(0, 255, size=(BATCH_SIZE, 64, 64, 3)).astype("float32")
    y = random.integers(0, CLASSES, size=BATCH_SIZE)
    make = getattr(keras.applications, network)
    model = make(weights=None, input_shape=(64, 64, 3), classes=CLASSES)
    optimizer = keras_lso.LossScaleOptimizer(
        keras.optimizers.SGD(0.01), initial_scale=initial_scale
    )
    model.compile(optimizer, loss="sparse_categorical_crossentropy")
    scales = []
    for _ in range(STEPS):
        model.train_on_batch(x, y)
        scales.append(float(optimizer.loss_scale))
    return scales, int(optimizer.skipped_steps)


def main():
    """Prints a row for each network and policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", default=NETWORKS, metavar="NETWORK")
    networks = parser.parse_args().networks
    keras.config.set_dtype_policy("mixed_float16")
    title = f"The first {STEPS} steps under {keras.backend.backend()}"
    table = rich.table.Table("network", "policy", "skipped", "log2(scale)", title=title)
    for network in networks:
        for policy, initial_scale in POLICIES.items():
            scales, skipped = scales_of(network, initial_scale)
            course = " ".join(f"{np.log2(scale):g}" for scale in scales)
            table.add_row(network, policy, str(skipped), course)
    rich.print(table)


if __name__ == "__main__":
    main()
