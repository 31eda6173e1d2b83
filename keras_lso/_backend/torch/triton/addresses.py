"""The addresses of tensors, for a kernel that steps many of them.

The addresses of weights and slots stay the same. The addresses of gradients may change
in each step. All are compared with those on the device, and sent if they differ. They
travel as arguments of PyTorch's kernels, as in its own fused steps. With a copy from
host memory, the host would have to wait, or to keep the memory until the copy is done.
A CUDA graph would repeat the copy in each replay.
"""

import itertools

import torch


class Group:
    """The tensors that one launch of a kernel steps, divided into blocks.

    Args:
        rows: List of lists of tensors of one device that the kernel writes. The first
            list has the weights. Each other list has one more tensor of each weight, in
            the same order. Their strides are checked when their addresses change.
        block: Int, the number of elements of a block.
        numbers: List of lists with an integer for each weight. Defaults to none.

    Attributes:
        written: List of all the tensors in `rows`.
        count: Int, the number of weights.
        blocks: Int, the number of blocks of all weights.
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
        """Returns three int64 tensors, or None if the tensors have gaps.

        Args:
            grads: List of the gradients, contiguous tensors.

        Returns:
            - A table with a column for each weight: its number of elements, its first
              block, its address, the addresses of its other tensors in `rows`, and its
              `numbers`.
            - The addresses of the gradients.
            - The column of the tensor of each block.
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
        # With the size of the output, PyTorch need not read it from the device.
        return torch.repeat_interleave(blocks_of_each, output_size=self.blocks)


class Numbers:
    """Integers that are kept on a device, and sent again only if they change.

    They are kept for one stream, in whose order they are overwritten and read. A CUDA
    graph has integers of its own, which no other step changes.
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
    """Returns an identifier of the current stream; None if a CUDA graph is captured."""
    if device.type != "cuda":
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.current_stream(device).cuda_stream
