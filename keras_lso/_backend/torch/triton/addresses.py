"""Where tensors are in memory, told to a kernel that steps many of them.

The addresses of weights and slots stay, those of gradients may be others in each step.
All are compared with those that the device has, and sent if they differ. They travel as
arguments of PyTorch's kernels, as in its own fused steps. A copy of host memory would
have to wait, or the memory to be kept until the copy is made, and a CUDA graph would
repeat it in each replay.
"""

import itertools

import torch


class Group:
    """Tensors that one launch of a kernel steps, in blocks of so many elements.

    Args:
        rows: List of lists of tensors of one device that the kernel writes: the weights
            and, in that order, what else it has of each. Their strides are compared
            when they move.
        block: Int, the number of elements of a block.
        numbers: List of lists with an integer for each weight. Defaults to none.

    Attributes:
        written: List of all those tensors.
        count: Int, the number of weights.
        blocks: Int, the number of blocks of all of them.
    """

    def __init__(self, rows, block, numbers=()):
        self._rows, self._block = rows, block
        self.written = list(itertools.chain.from_iterable(rows))
        self._device = rows[0][0].device
        self._sizes = list(map(torch.Tensor.numel, rows[0]))
        ends = list(itertools.accumulate(-(-size // block) for size in self._sizes))
        self.count, self.blocks = len(ends), ends[-1]
        self._head = [*self._sizes, 0, *ends[:-1]]
        self._tail = list(itertools.chain.from_iterable(numbers))
        self._regular_at: list[int] | None = None
        self._table, self._gradients = Numbers(self._device), Numbers(self._device)
        self._owners = None

    def on_device(self, grads):
        """Returns three tensors of int64, or None if the tensors have gaps.

        Args:
            grads: List of the gradients, contiguous tensors.

        Returns:
            - A table with a column for each weight: how many elements it has, its first
              block, its address, those of what else the kernel writes, and the numbers.
            - The addresses of the gradients.
            - For each block the column of its tensor.
        """
        addresses = list(map(torch.Tensor.data_ptr, self.written))
        if addresses != self._regular_at:
            if not self._is_regular():
                return None
            self._regular_at = addresses
        stream = stream_of(self._device)
        columns = [*self._head, *addresses, *self._tail]
        table, is_new = self._table.on_device(columns, stream)
        pointers = list(map(torch.Tensor.data_ptr, grads))
        gradients, _ = self._gradients.on_device(pointers, stream)
        if not is_new:
            return table, gradients, self._owners
        owners = self._owners_in(table)
        if stream is not None:
            self._owners = owners
        return table, gradients, owners

    def _is_regular(self):
        return all(
            tensor.is_contiguous()
            and tensor.numel() == size
            and tensor.device == self._device
            for row in self._rows
            for tensor, size in zip(row, self._sizes, strict=True)
        )

    def _owners_in(self, table):
        blocks_of_each = (table[: self.count] + (self._block - 1)) // self._block
        # Told how many there are, it need not read them from the device.
        return torch.repeat_interleave(blocks_of_each, output_size=self.blocks)


class Numbers:
    """Integers that are kept on a device, and sent when they are others.

    They are kept for one stream: in its order they are overwritten and read. What a
    CUDA graph records has its own, which no other step changes.
    """

    def __init__(self, device):
        self._device = device
        self._known = self._stream = self._tensor = None

    def on_device(self, numbers, stream):
        """Returns a tensor of a list of integers, and whether it was sent just now."""
        if stream is None:
            return self._sent(numbers), True
        if stream == self._stream and numbers == self._known:
            return self._tensor, False
        self._tensor = self._sent(numbers)
        self._known, self._stream = numbers, stream
        return self._tensor, True

    def _sent(self, numbers):
        tensor = torch.zeros(len(numbers), dtype=torch.int64, device=self._device)
        torch._foreach_add_(tensor.unbind(), numbers)
        return tensor


def stream_of(device):
    """Returns what tells streams apart; None if a CUDA graph records what runs."""
    if device.type != "cuda":
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.current_stream(device).cuda_stream
