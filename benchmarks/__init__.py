"""What a step costs, side by side with what else a user could run.

`python -m benchmarks --help` says how to run it. The files, from the outside in:

| file | holds |
| --- | --- |
| `__main__.py` | the command; one process a backend |
| `plan.py` | what is measured by default |
| `measure.py` | one backend: its groups of rows, then `first_step.py` and `fit.py` |
| `rows_<backend>.py` | how a Keras optimizer's step runs there, and its clock |
| `masters.py` | what the kinds of masters of 16-bit weights cost |
| `protected.py` | what `protect_statistics` adds to a batch in `fit` |
| `recorded.py` | what a `StepRecord` adds to a batch in `fit` |
| `host.py` | the host's time, of tensors so small that nothing else counts |
| `participants.py`, `participants_<backend>.py` | a step of two replicas or processes |
| `peers_<backend>.py` | what a user of the bare framework would run |
| `shapes.py`, `data.py`, `inner.py` | tensors, their values, the optimizers |
| `timing.py`, `memory.py`, `bytes_moved.py`, `machine.py` | what is measured |
| `limits.py` | what the numbers must not exceed |
| `report.py`, `tables.py` | the tables, from the JSON |

Commands of their own are

| file | tells |
| --- | --- |
| `initial_scale.py` | what `initial_scale="auto"` saves |
| `accelerators/` | what a step moves, holds and launches on a GPU or TPU |
| `rounding.py` | how well bfloat16 weights train with each kind of master |
| `spikes_healthy.py` | how often a spike guard skips a good step |
| `of_example.py` | what an example finds |

All of them write their results by `evidence.py`.
"""
