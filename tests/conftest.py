"""What holds for all tests, and the processes that they start.

Every test runs on one thread: several processes share few cores, and threads that spin would starve them. Models are
partitioned without measuring, since many tests compare two runs bit for bit.
"""

import gc
import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ASYNC_MULTIPIPE_PARTITION", "operations")

import torch

torch.set_num_threads(1)

# A shell starts what runs in its background with Ctrl-C ignored, and whatever that starts inherits it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Keep what imports made out of garbage collections: each training collects once, a fifth of a short one's time."""
    gc.collect()
    gc.freeze()
