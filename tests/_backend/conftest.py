"""What several tests of the trial of Triton's kernels need."""

import pytest


@pytest.fixture
def verdicts(monkeypatch):
    """The verdicts of a process that has tried nothing."""
    from keras_lso._backend.torch.triton import trial

    found = {}
    monkeypatch.setattr(trial, "_verdicts", found)
    return found
