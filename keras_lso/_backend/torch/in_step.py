"""The masters that the host knows to be in step with their variables on an accelerator.

A master and its variable are in step if the variable is the rounded master. Comparing
them reads both, which takes longer than the rest of the step. But they are in step
after an applied step, and a skipped step changes nothing. So it is enough to know that
nothing else has written them since. PyTorch counts the writes to a tensor, in its
`_version`.

A bfloat16 weight and its remainder are in step unless the weight is 0 and the remainder
negative, as after an assignment. Checking that takes three passes over both.

The flag of whether a step was applied is copied from the device without synchronising.
Steps compare the tensors until the flag has arrived. Steps also compare them

- after a write that PyTorch has counted, until a step is known to have been applied,
- if the tensors are not parameters: shards, and copies in a `StatelessScope`, which are
  new in each step,
- if a CUDA graph is captured, since it may be replayed after other writes.

PyTorch does not count writes to `tensor.data`, by a collective of `torch.distributed`,
by a replayed CUDA graph, or through another library's view of the same memory. Code
that writes a variable in such a way between two steps has to call
`torch.autograd.graph.increment_version`.
"""

import weakref

import torch


def are_known(pairs):
    """Whether all the pairs are known to be in step; called right before a step."""
    if _is_recorded():
        return False
    # No generator: `_is_known` removes each note that no longer holds.
    return all([_is_known(master, variable) for master, variable in pairs])


def note(pairs, finite):
    """Notes that a step has written the pairs if `finite`; called right after it."""
    if _is_recorded():
        return
    answer = None
    for master, variable in pairs:
        old = _notes.get(id(master))
        if old is not None and old.answer.arrived() is not False:
            # The older answer arrives sooner, and serves as well.
            old.written = _written(master, variable)
        elif _are_counted(master, variable):
            answer = answer or _Answer(finite)
            _notes[id(master)] = _Note(master, variable, answer)


class _Note:
    """A pair that only steps have written since the step of `answer`.

    `written` is the result of `_written` after the last of these steps.
    """

    __slots__ = ("master", "variable", "answer", "written")

    def __init__(self, master, variable, answer):
        key = id(master)
        self.master = weakref.ref(master, lambda _: _notes.pop(key, None))
        self.variable = weakref.ref(variable)
        self.answer = answer
        self.written = _written(master, variable)


# Keyed by the ids of the masters. Not in the optimizer: its copies have other masters.
_notes: dict[int, _Note] = {}


class _Answer:
    """The flag of whether a step was applied, copied from the device asynchronously."""

    def __init__(self, finite):
        self._event = None
        if finite.device.type == "cpu":
            self._answer = bool(finite)
        elif finite.device.type == "cuda" and torch.cuda.is_available():
            # Not on the default device, which may not be the host.
            self._copy = torch.empty(
                (), dtype=finite.dtype, device="cpu", pin_memory=True
            )
            self._copy.copy_(finite, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(finite.device))
        else:
            # The tensor has no value: it is on the `meta` device, or fake.
            self._answer = True

    def arrived(self):
        """Returns a bool; None until the device has computed it."""
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
    """Returns a value that changes when one of the two tensors is written."""
    # The address, since an assignment to `tensor.data` is not counted.
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
    """Whether a CUDA graph is captured in this step."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
