"""Where a small Transformer does not fit into float16, and that it trains without.

python examples/float16_report.py [PICTURE]
"""

import sys

import keras
from keras import layers, ops
from sklearn.datasets import load_digits

import keras_lso

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")

digits = load_digits()
rows, labels = digits.images.astype("float32"), digits.target

# Each row of an image is a token of 8 pixels from 0 to 16. Nobody normalizes them, so
# that the products of queries and keys are large; and a norm of one's own squares them.
inputs = keras.Input((8, 8))
tokens = layers.Dense(32, kernel_initializer="he_normal", name="embedding")(inputs)
start = keras.initializers.RandomNormal(stddev=1.0)
attention = layers.MultiHeadAttention(
    2, 16, kernel_initializer=start, dropout=0.1, name="attention"
)


class RootMeanSquare(layers.Layer):
    """A normalization that computes in the dtype of its layer."""

    def call(self, x):
        return x / ops.sqrt(ops.mean(ops.square(x), axis=-1, keepdims=True) + 1e-3)


values = RootMeanSquare(name="norm")(tokens + attention(tokens, tokens))
mlp = keras.Sequential(
    [layers.Dense(64, activation="gelu", name="wide"), layers.Dense(32, name="narrow")],
    name="mlp",
)
pooled = layers.GlobalAveragePooling1D(name="pool")(values + mlp(values))
logits = layers.Dense(10, dtype="float32", name="logits")(pooled)
model = keras.Model(inputs, logits, name="transformer")
model.compile(
    keras_lso.LossScaleOptimizer(keras.optimizers.Adam(1e-3)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)

# --8<-- [start:report]
report = keras_lso.float16_report(model, rows[:256], labels[:256])
print(report)
path = sys.argv[1] if len(sys.argv) > 1 else "float16_report.png"
report.plot(path)
print(f"Wrote {path}")

for name, trained in (("as it was", model), ("applied", report.apply(model))):
    logs = trained.fit(rows, labels, epochs=5, batch_size=64, verbose=0).history
    skipped = int(trained.optimizer.skipped_steps)
    print(f"{name}: loss {logs['loss'][-1]:.3f}, {skipped} steps skipped")
# --8<-- [end:report]
