"""Which masters the host knows to be in step with their variables, on an accelerator.

A master and its variable are in step if the rounded master is the variable. To find
out, both are read, which takes longer than the rest of the step. But they are in step
after a step of ours that was applied, and after one that was skipped they are as they
were before. So it is enough to know that nothing else has written them since: PyTorch
counts the writes to a tensor, in its `_version`.

Whether the step was applied is in the device's memory. The host does not synchronise
for it: until the answer has arrived, steps compare. So do all steps

- after a write that PyTorch has counted, until a step is known to have been applied,
- of tensors that are no parameters: shards, and copies in a `StatelessScope`, which
  are others in each step,
- that a CUDA graph records: it is replayed after other writes.

PyTorch does not count writes to `tensor.data`, by a collective of `torch.distributed`,
by a replayed CUDA graph, or through another library's view of the same memory. Code
that does that to a variable between two steps has to say so, by
`torch.autograd.graph.increment_version`.
"""

import weakref

import torch

from keras_lso._backend._torch_measure import is_on_host


def are_known(pairs):
    """Whether all the pairs are known to be in step, right before a step."""
    if _is_recorded():
        return False
    # All of them: this removes each note that no longer holds.
    return all([_is_known(master, variable) for master, variable in pairs])


def note(pairs, finite):
    """Notes that a step has written the pairs, unless `finite` is False.

    To be called right after the step; `are_known` is called right before it.
    """
    if _is_recorded():
        return
    answer = None
    for master, variable in pairs:
        old = _notes.get(id(master))
        if old is not None and old.answer.arrived() is not False:
            # An older answer says more, and arrives sooner.
            old.written = _written(master, variable)
        elif _are_counted(master, variable):
            answer = answer or _Answer(finite)
            _notes[id(master)] = _Note(master, variable, answer)


class _Note:
    """A pair, as a step has left it.

    Attributes:
        master: Weak reference.
        variable: Weak reference.
        answer: `_Answer` of a step; since then only steps have written the pair.
        written: What `_written` says after the last of them.
    """

    __slots__ = ("master", "variable", "answer", "written")

    def __init__(self, master, variable, answer):
        key = id(master)
        self.master = weakref.ref(master, lambda _: _notes.pop(key, None))
        self.variable = weakref.ref(variable)
        self.answer = answer
        self.written = _written(master, variable)


# By the masters' ids. Not in the optimizer, whose copies have other masters.
_notes: dict[int, _Note] = {}


class _Answer:
    """Whether a step was applied, which is copied from the device asynchronously."""

    def __init__(self, finite):
        self._event = None
        if is_on_host(finite):
            self._answer = bool(finite)
        elif finite.device.type == "cuda" and torch.cuda.is_available():
            self._copy = torch.empty((), dtype=finite.dtype, pin_memory=True)
            self._copy.copy_(finite, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(finite.device))
        else:
            # A tensor that has no value, on the `meta` device or a fake one.
            self._answer = True

    def arrived(self):
        """Returns a bool, None as long as the device has not computed it."""
        if self._event is not None:
            if not self._event.query():
                return None
            self._answer, self._event = bool(self._copy), None
        return self._answer


def _is_known(master, variable):
    found = _notes.get(id(master))
    if found is None:
        return False
    if (
        found.master() is not master
        or found.variable() is not variable
        or found.written != _written(master, variable)
    ):
        del _notes[id(master)]
        return False
    return found.answer.arrived() is True


def _written(master, variable):
    """Returns what no longer is the same once one of them has been written."""
    # An assignment to `tensor.data` is not counted, but is seen by the address.
    return (
        master._version,
        variable._version,
        master.data_ptr(),
        variable.data_ptr(),
    )


def _are_counted(master, variable):
    """Whether PyTorch counts the writes to these very tensors, step after step."""
    return all(
        isinstance(t, torch.nn.Parameter) and not t.is_inference()
        for t in (master, variable)
    )


def _is_recorded():
    """Whether a CUDA graph records this step."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
