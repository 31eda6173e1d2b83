"""The effect of float16 on a small network's gradients, at each loss scale.

python examples/underflow.py [PICTURE]
"""

import sys

import keras
from keras import layers
from sklearn.datasets import load_digits

import keras_lso

keras.utils.set_random_seed(0)

digits = load_digits()
images = (digits.images[..., None] / 16).astype("float32")
labels = keras.utils.to_categorical(digits.target, 10)

# Sigmoids make gradients smaller from layer to layer, and so the first ones tiny. The
# squared error, a mean over ten classes, begins with gradients that are small already.
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(8, 3, activation="sigmoid", name="conv"),
        layers.BatchNormalization(name="norm"),
        layers.Flatten(name="flatten"),
        layers.Dense(32, activation="sigmoid", name="hidden_1"),
        layers.Dense(32, activation="sigmoid", name="hidden_2"),
        layers.Dense(32, activation="sigmoid", name="hidden_3"),
        layers.Dense(10, activation="softmax", name="output"),
    ]
)
# --8<-- [start:report]
model.compile("adam", loss="mean_squared_error")

report = keras_lso.underflow_report(model, images, labels)
print(report)
# --8<-- [end:report]
path = sys.argv[1] if len(sys.argv) > 1 else "underflow.png"
report.plot(path)
print(f"Wrote {path}")
