"""The properties: each asks a class of `Adapter`, and says what it found.

It returns the text of a cell, and whether that is as it should be: None, if it is
neither good nor bad.
"""

import numpy as np

from conformance.adapter import NotOffered

SHAPES = (), (3,), (4, 8)
INF, NAN = float("inf"), float("nan")
# Exact in float16, in which mpx computes, at each scale that multiplies them.
GOOD = 0.5, -0.25, 0.75, 0.125


def slopes(value=0.5, at=None, there=INF):
    """Returns the gradients of a step, in one place another value."""
    tensors = [np.full(shape, value, "float32") for shape in SHAPES]
    for tensor in tensors:
        tensor.reshape(-1)[-1] = 0.0
    if at:
        tensors[at[0]].reshape(-1)[at[1]] = there
    return tensors


BAD = slopes(at=(1, 0))
# With a scale that grows after two good steps.
MIXED = 0.5, BAD, 0.75, 0.125, BAD, 0.25
GROWS = {"scale": 64.0, "growth_steps": 2}


def take(run, steps):
    """Takes steps: each a value of all gradients, or the gradients."""
    for step in steps:
        run.step(step if isinstance(step, list) else slopes(step))
    return run


def trained(adapter, steps, **arguments):
    weights = [np.linspace(-1, 1, s.size, dtype="float32") for s in slopes()]
    for each in weights:
        each[-1] = -0.0  # Its gradients are 0: it stays, unless 0.0 is added.
    weights = [w.reshape(s) for w, s in zip(weights, SHAPES, strict=True)]
    return take(adapter(weights, **arguments), steps)


def is_finite(state):
    return all(np.isfinite(w).all() for w in state.weights)


def scale_of(run):
    if (scale := run.state().scale) is None:
        raise NotOffered("a loss scale")
    return scale


def least_scale(adapter):
    scale = scale_of(trained(adapter, [BAD] * 300))
    return (f"stops at {scale:.2g}", True) if scale else ("becomes 0", False)


def next_step(adapter):
    run = trained(adapter, [BAD] * 300)
    before, after = run.state(), take(run, [0.5]).state()
    if not is_finite(after):
        return "makes weights NaN", False
    if after.equals(trained(adapter, [0.5]).state()):
        return "is applied", True
    if all(map(np.array_equal, before.weights, after.weights)):
        return "moves no weight", False
    return "is another step", False


def largest_scale(adapter):
    scale = scale_of(trained(adapter, [0.0] * 300, growth_steps=1))
    return ("becomes inf", False) if scale == INF else (f"stops at {scale:.2g}", True)


def own_floor(adapter):
    scale, name = scale_of(trained(adapter, [BAD] * 30, floor=4.0)), adapter.offers
    if scale == 4:
        return name["floor"], True
    return f"{name['floor']}, but it falls to {scale:.2g}", False


def fixed(adapter):
    run = trained(adapter, [0.5, BAD, 0.5], fixed=True).state()
    same, name = trained(adapter, [0.5, 0.5], fixed=True).state(), adapter.offers
    if run.equals(same) and run.scale == same.scale:
        return name["fixed"], True
    return f"{name['fixed']}: overflows are applied", False


def skipped_step(adapter):
    for steps in ((), GOOD):
        run = trained(adapter, steps)
        before, after = run.state(), take(run, [BAD]).state()
        if not before.equals(after):
            return "changes weights or slots", False
        before.scale = after.scale
        if before.bits() != after.bits():
            return "makes 0.0 of -0.0", False
    return "changes no bit", True


def places(adapter):
    run, missed = trained(adapter, GOOD), []
    at = [(t, i) for t, s in enumerate(slopes()) for i in range(s.size)]
    for place, there in [(p, v) for p in at for v in (NAN, INF, -INF)]:
        before = run.state()
        after = take(run, [slopes(at=place, there=there)]).state()
        if not before.equals(after):
            missed.append((place, there))
            run = trained(adapter, GOOD)
    count = 3 * len(at)
    return f"{len(missed) or 'none'} of {count} missed", not missed


def unscaled_overflow(adapter):
    run = trained(adapter, [0.5], scale=2.0**-10)
    before = run.state()
    run.step(slopes(1e30), gain=1e10)
    after = run.state()
    if after.equals(before):
        return "are skipped", True
    return "are applied" if is_finite(after) else "make weights NaN", False


def growth(adapter):
    grown, same = (
        trained(adapter, GOOD, **g).state() for g in (GROWS, {"scale": 64.0})
    )
    if grown.scale == same.scale:
        raise NotOffered("a scale that grows")
    return (
        ("is as any other", True) if grown.equals(same) else ("is another step", False)
    )


def micro_batch(adapter):
    found = trained(adapter, [0.5, BAD, 0.25, 0.125], micro_batches=2).state().weights
    for pair, text in (((0.5, 0.25), "is left out"), ((0.25, 0.125), "skips its step")):
        expected = trained(adapter, pair, micro_batches=2).state().weights
        if all(map(np.array_equal, found, expected)):
            return text, True
    return "changes the step", False


def resumed(adapter):
    run, saved = trained(adapter, [], **GROWS), []
    for step in MIXED:
        saved.append((run.state().weights, run.save()))
        take(run, [step])
    for stop, (weights, checkpoint) in enumerate(saved):
        second = adapter(weights, **GROWS)
        second.load(checkpoint)
        if take(second, MIXED[stop:]).state().bits() != run.state().bits():
            return f"is another run, after {stop} steps", False
    return "equals no stop, to the bit", True


def observed(adapter):
    runs = [trained(adapter, MIXED, **GROWS, **o) for o in ({}, {"observed": True})]
    is_same = runs[0].state().bits() == runs[1].state().bits()
    return "changes no bit" if is_same else "changes the run", is_same


def told(adapter):
    if not (name := adapter.offers.get("skipped")):
        raise NotOffered("skipped")
    run = trained(adapter, [])
    answers = [take(run, [step]).state().skipped for step in MIXED]
    is_right = answers == [step is BAD for step in MIXED]
    return name if is_right else f"{name}, wrongly", is_right


def spike(adapter):
    name = adapter.offers.get("guard")
    run = trained(adapter, GOOD * 20, scale=1.0, **({"guard": True} if name else {}))
    before, after = run.state(), take(run, [1000.0]).state()
    if before.equals(after):
        return f"is skipped, with {name}", True
    return "is applied", False if name else None


PROPERTIES = {
    "the loss scale, in 300 overflows in a row": least_scale,
    "the first finite step after them": next_step,
    "the loss scale, while nothing overflows": largest_scale,
    "a floor of the loss scale": own_floor,
    "a fixed loss scale": fixed,
    "a skipped step": skipped_step,
    "NaN, inf or -inf in any one place": places,
    "finite gradients that are inf when unscaled": unscaled_overflow,
    "the step at which the scale grows": growth,
    "a micro-batch that overflows": micro_batch,
    "a resumed run, stopped anywhere": resumed,
    "a look at the unscaled gradients": observed,
    "whether the last step was skipped": told,
    "a loss spike": spike,
}
"""What makes the cells of each row."""


def ask(adapter):
    """Returns the cells of an adapter by their rows: the text, and if it holds."""
    cells = {}
    for row, answer in PROPERTIES.items():
        try:
            text, holds = answer(adapter)
        except NotOffered:
            text, holds = "not offered", None
        cells[row] = [text, holds]
    return cells
