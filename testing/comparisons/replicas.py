"""Comparisons of what replicas and shards need."""

import keras
import pytest

from testing.comparisons.inputs import RANDOM, equal, tensor
from testing.comparisons.registry import compares


@compares("replicas.reduce_gradients")
def same_on_one_replica(own, reference):
    grads = [tensor(RANDOM[0]), None, tensor(1.0, "float16")]
    for actual, expected in zip(own(grads), reference(grads), strict=True):
        assert actual is expected


@compares("replicas.sharded_alike")
def same_plain_gradients(own, reference):
    grads, variables = [tensor(1.0), None], [keras.Variable(1.0), keras.Variable(2.0)]
    told = grads, variables, [v.value for v in variables]
    assert own(*told) is reference(*told) is grads


@compares("replicas.are_shards")
def same_whole_gradients(own, reference):
    variables = [keras.Variable(1.0), keras.Variable(2.0)]
    grads = [tensor(1.0), None]
    assert own(grads, variables) is reference(grads, variables) is False


@compares(
    "replicas.check_on_replicas",
    "replicas.check_replica_context",
    "replicas.check_accumulates",
)
def same_acceptance(own, reference):
    takes_variables = own.__name__ == "check_on_replicas"
    argument = [keras.Variable(1.0)] if takes_variables else "apply"
    assert own(argument) is reference(argument) is None


@compares("replicas.check_axis_name")
def axes_are_taken(own, reference):
    assert own("batch") is own(None) is reference(None) is None
    with pytest.raises(ValueError, match="`axis_name` is an axis"):
        reference("batch")


@compares("replicas.check_shards_state")
def state_is_shared(own, reference):
    assert own() is None
    with pytest.raises(ValueError, match="needs the JAX backend"):
        reference()


@compares("replicas.over_shards", "replicas.sharded_like")
def same_tensor(own, reference):
    like = (tensor(RANDOM[1]),) if own.__name__ == "sharded_like" else ()
    equal(own(tensor(RANDOM[0]), *like), reference(tensor(RANDOM[0]), *like))


@compares("replicas.keeps_rows")
def whole_rows(own, reference):
    assert own(tensor(RANDOM[0])) is reference(tensor(RANDOM[0])) is True


@compares("replicas.layout_of")
def no_layout(own, reference):
    assert own(tensor(RANDOM[0])) is reference(tensor(RANDOM[0])) is None
