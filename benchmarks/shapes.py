"""The shapes of the trainable tensors of a model."""

import math
from functools import partial

import numpy as np


def resnet50():
    """The 161 trainable tensors of a ResNet-50: 25.6 million parameters.

    He et al., 2015, Deep Residual Learning for Image Recognition, table 1.
    """

    def conv(kernel, inputs, outputs):
        """A convolution without bias, and the batch normalization behind it."""
        return [(kernel, kernel, inputs, outputs), (outputs,), (outputs,)]

    shapes = conv(7, 3, 64)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            if block == 0:
                shapes += conv(1, inputs, 4 * width)
            shapes += conv(1, inputs, width)
            shapes += conv(3, width, width)
            shapes += conv(1, width, 4 * width)
            inputs = 4 * width
    return [*shapes, (inputs, 1000), (1000,)]


def bert_base():
    """The 199 trainable tensors of BERT-base: 109.5 million parameters.

    Devlin et al., 2018, BERT: 12 layers of width 768, a vocabulary of 30,522, and
    the pooler.
    """
    width, inner, layers = 768, 3072, 12

    def dense(inputs, outputs):
        return [(inputs, outputs), (outputs,)]

    normalization = [(width,), (width,)]
    embeddings = [(30522, width), (512, width), (2, width), *normalization]
    attention = 4 * dense(width, width) + normalization
    feed_forward = dense(width, inner) + dense(inner, width) + normalization
    return embeddings + layers * (attention + feed_forward) + dense(width, width)


def many_small():
    """1,000 tensors of 1 to 4 K elements: what counts is the overhead for each.

    Four sizes, not a thousand: models repeat their shapes, and JAX compiles what
    makes a tensor once for each.
    """
    random = np.random.default_rng(0)
    return [(1024 * int(n),) for n in random.integers(1, 5, size=1000)]


def of_four(number):
    """So small that a kernel costs nothing: what counts is the host."""
    return [(4,)] * number


def one():
    """One matrix: what is compiled for a single tensor takes it alone."""
    return [(4096, 4096)]


def tiny():
    """A few tensors, to see that all of it runs."""
    return [(3, 3, 4, 8), (8,), (8, 16), (16,), (1,)]


SHAPES = {
    "resnet50": resnet50,
    "bert-base": bert_base,
    "many-small": many_small,
    "160-of-4": partial(of_four, 160),
    "1000-of-4": partial(of_four, 1000),
    "one": one,
    "tiny": tiny,
}


def parameters(shapes):
    """The number of elements of them all."""
    return sum(math.prod(shape) for shape in shapes)
