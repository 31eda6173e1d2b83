"""The events that TensorBoard reads from a folder."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util


def events_in(folder):
    """Returns the steps and values of each tag."""
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    return {
        tag: [(e.step, tensor_util.make_ndarray(e.tensor_proto)) for e in of_tag]
        for tag in events.Tags()["tensors"]
        for of_tag in [events.Tensors(tag)]
    }
