"""Every test runs on one thread: several processes share few cores, and threads that spin would starve them."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
