"""TransferQueue 0.1.11 with its storage in memory, in a process of its own that is told "put", "get" or "clear".

1. Its controller and storage are Ray actors; `TransferQueueProcess` keeps Ray, torch and their threads out of the measuring
   process. A figure is taken inside that process, around the calls alone.
2. It is used through the client that its own `kv_*` calls wrap, with the two storage units of its own configuration
   (in a
   few runs one unit read slower and four wrote slower; other thread counts showed no gain, on a busy machine).
3. `get` is what a trainer does: ask the controller for a batch that is ready, then fetch its columns.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from types import TracebackType

LABEL = "TransferQueue 0.1.11 (RAM)"
COLUMNS = ("tokens", "logprobs", "mask")


class TransferQueueProcess:
    """The running peer; each call moves one batch of `num_samples` rows of `num_tokens` tokens."""

    def __init__(self, *, num_samples: int, num_tokens: int) -> None:
        self.num_bytes = num_samples * num_tokens * (4 + 4 + 1)
        # Ray puts sockets below its folder, and a socket's path has 107 characters.
        self._ray_folder = tempfile.mkdtemp(prefix="sf-ray-", dir="/tmp")
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, self._ray_folder, str(num_samples), str(num_tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
        )

    def __enter__(self) -> TransferQueueProcess:
        self._ask("ready")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            # Ray's own processes may still be writing logs there.
            shutil.rmtree(self._ray_folder, ignore_errors=True)

    def put(self) -> float:
        """Put a new batch; returns bytes per second."""
        return self.num_bytes / self._ask("put")

    def get(self) -> float:
        """Get the batch last put and clear it (the clearing is not measured); returns bytes per second."""
        seconds = self._ask("get")
        self._ask("clear")
        return self.num_bytes / seconds

    def _ask(self, word: str) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:  # Ray prints there too
            if line.startswith("bench:"):
                return float(line.removeprefix("bench:"))
        raise RuntimeError(
            f"the TransferQueue process ended with {self._process.wait()} when asked to {word}; "
            f"run it by hand: {sys.executable} {__file__} /tmp/sf-ray 8 16"
        )


def serve(ray_folder: str, num_samples: int, num_tokens: int) -> None:
    import ray
    import torch
    import transfer_queue
    from tensordict import TensorDict

    # Its actors ask for whole CPUs, more than a small machine has; they still share the real ones.
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=2**28,
        _temp_dir=ray_folder,
    )
    transfer_queue.init()
    client = transfer_queue.get_client()
    generator = torch.Generator().manual_seed(7)
    shape = (num_samples, num_tokens)
    batch = TensorDict(
        {
            "tokens": torch.randint(0, 150_000, shape, dtype=torch.int32, generator=generator),
            "logprobs": -torch.rand(shape, generator=generator),
            "mask": torch.ones(shape, dtype=torch.int8),
        },
        batch_size=[num_samples],
    )
    number = 0
    for line in sys.stdin:
        word = line.strip()
        started = time.perf_counter()
        match word:
            case "put":
                number += 1
                client.put(data=batch, partition_id=f"batch-{number}")
            case "get":
                places = client.get_meta(
                    data_fields=list(COLUMNS),
                    batch_size=num_samples,
                    partition_id=f"batch-{number}",
                    task_name="train",
                )
                got = client.get_data(places)
                seconds = time.perf_counter() - started
                assert torch.equal(torch.stack(list(got["tokens"].unbind())), batch["tokens"])
                print(f"bench:{seconds}", flush=True)
                continue
            case "clear":
                client.clear_partition(f"batch-{number}")
        print(f"bench:{time.perf_counter() - started}", flush=True)
    transfer_queue.close()
    ray.shutdown()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
