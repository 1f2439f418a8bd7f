"""One tensor-parallel rank that holds half of a vocabulary: prints entropies and its part of their gradient as JSON."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from strawflow_workers.trainer.divergences import vocab_parallel_entropy

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
whole = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(7)) * 3
logits = whole[:, 4 * rank : 4 * rank + 4].clone().requires_grad_()
found = vocab_parallel_entropy(logits, dist.group.WORLD)
(found * torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)).sum().backward()
assert logits.grad is not None
print(json.dumps({"entropy": found.tolist(), "gradient": logits.grad.tolist()}))
dist.barrier()
dist.destroy_process_group()
