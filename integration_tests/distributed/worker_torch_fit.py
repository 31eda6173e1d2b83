"""One of two PyTorch processes that call Keras's `fit` together.

    python -m integration_tests.distributed.worker_torch_fit RANK PORT FOLDER

For each of `torch_fits.FITS` it writes its variables after each step to
`FOLDER/FIT-RANK.npz`, and prints its history: `HISTORY [FIT, {NAME: [...]}]`.
"""

import json
import sys

import keras
import torch

from integration_tests.distributed import problem, torch_fits

rank, port, folder = int(sys.argv[1]), *sys.argv[2:]


def train(name):
    fit = torch_fits.FITS[name]
    # Keras numbers its names as in a new process.
    keras.utils.clear_session()
    torch_fits.set_distribution(fit)
    model, recorder = torch_fits.make_model(fit, rank), torch_fits.Recorder()
    # The processes of a row take the same batches.
    is_row = fit.mesh is not None and fit.mesh[0] == 1
    batches = range(2) if is_row else [rank]
    if fit.is_resumed:
        saved = keras.callbacks.OrbaxCheckpoint(f"{folder}/orbax-{rank}")
        torch_fits.train(model, fit, batches, recorder, saved, epochs=1)
        model.ddp_model = None
        keras.utils.clear_session()
        torch_fits.set_distribution(fit)
        model = torch_fits.make_model(fit, rank)
        model.optimizer.build(model.trainable_variables)
        model.load_weights(f"{folder}/orbax-{rank}")
    epoch = {"initial_epoch": int(fit.is_resumed)}
    history = torch_fits.train(model, fit, batches, recorder, **epoch)
    problem.save(f"{folder}/{name}-{rank}", recorder.steps)
    if fit.statistics:
        problem.save(f"{folder}/moving-{rank}", recorder.statistics)
    print("HISTORY", json.dumps([name, history]))
    # PyTorch may hang at the end if a network outlives its group.
    model.ddp_model = None


keras.distribution.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
for name in torch_fits.FITS:
    train(name)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
