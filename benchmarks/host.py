"""The host's time of an eager step, on one thread.

The tensors have 4 elements, so that kernels cost next to nothing: what is timed is how
long Python and the dispatcher take to find out what is to be done.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial

from benchmarks.data import check_alike, check_healthy, make_data
from benchmarks.inner import INNER
from benchmarks.participants import optimizers
from benchmarks.timing import summarize, time_in_turn

SHAPES = ("160-of-4", "1000-of-4")
_TOLERANCE = 2e-3
"""Less than a step that is left out, more than float16 rounds and Adam's epsilon does.

PyTorch's stands beside the root of a second moment whose bias is corrected.
"""


@dataclass(frozen=True)
class Recipe:
    """What the rows of a group have in common, besides their tensors.

    Attributes:
        name: String.
        inner: String. One of `INNER`.
        kind: String. One of `data.KINDS`.
        clip_norm: Float or None. What the norm of all gradients is clipped to.
        micro_batches: Int. How many gradients are added up for an update. A step is
            timed over all of them, and its time is that of one.
        masters: String, the argument `master_weights`.
        slots: String or None, the argument `slot_dtype`.
    """

    name: str
    inner: str
    kind: str = "float32"
    clip_norm: float | None = None
    micro_batches: int = 1
    masters: str = "auto"
    slots: str | None = None

    def make_inner(self):
        """Returns a new Keras optimizer."""
        accumulated = self.micro_batches if self.micro_batches > 1 else None
        return INNER[self.inner].make(
            global_clipnorm=self.clip_norm, gradient_accumulation_steps=accumulated
        )


RECIPES = (
    Recipe("SGD+momentum", "SGD+momentum"),
    Recipe("AdamW", "AdamW"),
    Recipe("AdamW, clipped", "AdamW", clip_norm=1.0),
    Recipe("AdamW, clipped, of 4", "AdamW", clip_norm=1.0, micro_batches=4),
    Recipe("Lion", "Lion"),
    Recipe("RMSprop", "RMSprop"),
    Recipe("Nadam", "Nadam"),
    Recipe("Adagrad", "Adagrad"),
    Recipe("Adadelta", "Adadelta"),
    Recipe("LARS", "LARS"),
    Recipe("SGD+momentum, float16", "SGD+momentum", kind="float16"),
)


def chosen_recipes(inner=None, kinds=None):
    """Returns those of some inner optimizers and some kinds, or all."""
    return [
        recipe
        for recipe in RECIPES
        if recipe.inner in (inner or INNER) and recipe.kind in (kinds or [recipe.kind])
    ]


def measure(rows, peers, recipe, shapes, rounds):
    """Measures the rows of a recipe in turn, and returns their group.

    Args:
        rows: Module `rows_<backend>`.
        peers: Module `peers_<backend>`.
        recipe: `Recipe`.
        shapes: String. The name of the shapes.
        rounds: Int.
    """
    data = make_data(shapes, recipe.kind)
    with rows.one_thread():
        roles, steps = _steps(rows, peers, recipe, rows.Tensors(data))
        for step in steps.values():
            rows.first_seconds(step)
        clocks = {name: partial(rows.seconds, step) for name, step in steps.items()}
        seconds = time_in_turn(clocks, rounds)
    where = f"host, {shapes}, {recipe.name}"
    for name, step in steps.items():
        check_healthy(f"{where}, {name}", step, data)
    alike = _alike(peers, recipe, roles)
    check_alike(where, {name: steps[name] for name in alike}, _TOLERANCE)
    return {
        "mode": "eager",
        "shapes": shapes,
        "inner": recipe.name,
        "kind": recipe.kind,
        "tensors": len(data.weights),
        "rows": [
            {"name": name, "role": role, **_of_one(recipe, seconds[name])}
            for name, role in roles.items()
        ],
    }


def _steps(rows, peers, recipe, tensors):
    """Returns the role and the step of each row, by name."""
    roles, steps = {}, {}
    for name, (role, optimizer) in optimizers(recipe.make_inner).items():
        if recipe.kind == "float16" and role != "ours":
            name = f"{name}, no masters"
        variables, scaled = tensors.variables(), role != "inner"
        step = rows.keras_step("eager", optimizer, variables, tensors, scaled)
        roles[name] = role
        steps[name] = _repeated(step, recipe.micro_batches)
    loop = {"clip_norm": recipe.clip_norm, "micro_batches": recipe.micro_batches}
    name, make = list(peers.peers("eager", recipe.inner, **loop).items())[-1]
    roles[name], steps[name] = "peer", make(tensors)
    return roles, steps


def _repeated(step, times):
    def run():
        for _ in range(times):
            step.run()

    return step if times == 1 else dataclasses.replace(step, run=run)


def _alike(peers, recipe, roles):
    """Returns the names of the rows whose arithmetic is the same."""
    same = {"ours"} if recipe.kind == "float16" else {"inner", "keras", "ours"}
    if recipe.inner not in peers.STAND_INS:
        same.add("peer")
    return [name for name, role in roles.items() if role in same]


def _of_one(recipe, seconds):
    return summarize([s / recipe.micro_batches for s in seconds])
