"""The environment that vLLM's processes are started in: a quiet log, and time enough to end."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

DEFAULTS = {
    # A start would print dozens of lines from three processes; VLLM_LOGGING_LEVEL=INFO brings them back.
    "VLLM_LOGGING_LEVEL": "ERROR",
    # vLLM's own 5 s are less than a worker needs to end on a busy machine, and one that is killed leaves shared memory.
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "60",
    # vLLM looks at every name of torch's, old ones too.
    "PYTHONWARNINGS": "ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning",
}
"""vLLM's own variables. What the user has set counts, here and in vLLM's processes."""


@contextmanager
def vllm_environment() -> Iterator[None]:
    """The time in which vLLM is imported, configured or started; its processes inherit the variables."""
    ours = {name: value for name, value in DEFAULTS.items() if name not in os.environ}
    os.environ.update(ours)
    if "VLLM_LOGGING_LEVEL" in ours:
        logging.getLogger("vllm").setLevel(logging.ERROR)  # where somebody imported vLLM before
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
