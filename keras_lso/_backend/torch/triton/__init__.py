"""Steps in one pass on a GPU, by kernels in Triton: `steps.py` launches them."""
