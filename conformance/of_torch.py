"""`torch.amp.GradScaler`, alone and as Accelerate and Lightning Fabric use it."""

import copy
import importlib.util
import tempfile

import torch

from conformance.adapter import RATE, Adapter, State, loss_of


class GradScaler(Adapter):
    """The loop of its docstring."""

    name, packages = "GradScaler", ("torch",)
    offers = dict(
        floor="`update(new_scale=...)` after each step",
        fixed="`update(new_scale=...)` after each step",
        micro_batches="several `backward`",
        observed="`unscale_`",
        skipped="`get_scale()` falls",
    )

    def start(self, floor=0.0, fixed=False, micro_batches=1, observed=False):
        self.floor, self.fixed, self.observed = floor, fixed, observed
        self.micro_batches, self.seen, self.skipped = micro_batches, 0, None
        self.module = torch.nn.ParameterList(torch.tensor(w) for w in self.weights)
        self.optimizer = torch.optim.Adam(self.module.parameters(), RATE)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=self.scale, growth_interval=self.growth_steps
        )
        self.wrap()

    def wrap(self):
        """What a library does to the three."""

    def loss(self, slopes, gain):
        slopes = map(torch.as_tensor, slopes)
        return loss_of(list(self.module.parameters()), slopes, float(gain))

    def step(self, slopes, gain=1.0):
        self.backward(self.loss(slopes, gain) / self.micro_batches)
        self.seen += 1
        if self.seen % self.micro_batches:
            return
        if self.observed:
            self.look()
        before = self.scaler.get_scale()
        self.update()
        self.skipped = self.scaler.get_scale() < before
        if self.fixed:
            self.scaler.update(new_scale=self.scale)
        elif self.floor:
            self.scaler.update(new_scale=max(self.floor, self.scaler.get_scale()))
        self.optimizer.zero_grad()

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def look(self):
        self.scaler.unscale_(self.optimizer)

    def update(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state(self):
        slots = [n for slots in self.optimizer.state.values() for n in slots.values()]
        tensors = [*self.module.parameters(), *slots]
        copies = [t.detach().numpy().copy() for t in tensors]
        count = len(self.weights)
        scale = self.scaler.get_scale()
        return State(copies[:count], copies[count:], scale, self.skipped)

    def save(self):
        return copy.deepcopy((self.optimizer.state_dict(), self.scaler.state_dict()))

    def load(self, saved):
        self.optimizer.load_state_dict(saved[0])
        self.scaler.load_state_dict(saved[1])


class Accelerate(GradScaler):
    """`Accelerator`. On a CPU it makes no scaler, so it gets one."""

    name, packages = "Accelerate", ("accelerate",)
    offers = dict(
        micro_batches="`accumulate`",
        observed="`unscale_gradients`",
        skipped="`optimizer_step_was_skipped`",
    )

    def wrap(self):
        import accelerate

        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
        self.accelerator = accelerate.Accelerator(
            mixed_precision="fp16",
            gradient_accumulation_steps=self.micro_batches,
            cpu=True,
        )
        self.accelerator.scaler, self.accelerator.native_amp = self.scaler, True
        prepared = self.accelerator.prepare(self.module, self.optimizer)
        self.module, self.optimizer = prepared

    def step(self, slopes, gain=1.0):
        with self.accelerator.accumulate(self.module):
            self.accelerator.backward(self.loss(slopes, gain))
            if self.observed:
                self.accelerator.unscale_gradients(self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self):
        state = super().state()
        state.skipped = self.accelerator.optimizer_step_was_skipped
        return state

    def save(self):
        folder = tempfile.TemporaryDirectory()
        self.accelerator.save_state(folder.name)
        return folder

    def load(self, saved):
        self.accelerator.load_state(saved.name)


class Fabric(GradScaler):
    """Lightning's `Fabric`, with its plugin `MixedPrecision` around a scaler."""

    name, packages = "Fabric", ("lightning-fabric",)

    def wrap(self):
        from lightning_fabric import Fabric
        from lightning_fabric.plugins import MixedPrecision

        plugin = MixedPrecision("16-mixed", "cpu", self.scaler)
        self.fabric = Fabric(accelerator="cpu", devices=1, plugins=plugin)
        self.module, self.optimizer = self.fabric.setup(self.module, self.optimizer)

    def backward(self, loss):
        self.fabric.backward(loss)

    def look(self):
        clipped = {"max_norm": 1e9, "error_if_nonfinite": False}
        self.fabric.clip_gradients(self.module, self.optimizer, **clipped)

    def update(self):
        self.optimizer.step()

    def contents(self):
        # Without the scaler, as the example of `Fabric.save`, its scale starts again.
        contents = {"model": self.module, "optimizer": self.optimizer}
        return {**contents, "scaler": self.scaler}

    def save(self):
        folder = tempfile.TemporaryDirectory()
        self.fabric.save(f"{folder.name}/saved", self.contents())
        return folder

    def load(self, saved):
        self.fabric.load(f"{saved.name}/saved", self.contents())


PEERS = {"accelerate": Accelerate, "lightning_fabric": Fabric}
INSTALLED = [a for n, a in PEERS.items() if importlib.util.find_spec(n)]
ADAPTERS = [GradScaler, *INSTALLED]
