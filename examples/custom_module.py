"""Train a module of your own under any data parallelism: here an MLP learns to add up its inputs.

python examples/custom_module.py
torchrun --nproc-per-node 2 examples/custom_module.py zero2      # or ddp, zero1, zero3
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

import phalanx

BATCH, MICRO_BATCHES = 64, 2

device = phalanx.init_distributed()
layout = phalanx.Layout(data_parallel=sys.argv[1] if len(sys.argv) > 1 else "ddp")
mesh = phalanx.build_mesh(layout)
torch.manual_seed(0)  # the same weights and the same batches on every rank

model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
strategy = phalanx.distribute(model, layout, mesh, device, blocks=[model[0], model[2]])
optimizers = [torch.optim.AdamW(strategy.trainable_parameters.values(), lr=0.01)]

for step in range(1, 101):
    inputs = torch.randn(BATCH, 8)[mesh.dp_rank :: mesh.dims.dp_size].to(device)  # the share of this rank
    loss_sum = torch.zeros((), device=device)
    for index, x in enumerate(inputs.chunk(MICRO_BATCHES)):
        with strategy.accumulate(last=index == MICRO_BATCHES - 1):
            loss = F.mse_loss(strategy.model(x).squeeze(1), x.sum(1), reduction="sum")
            loss.backward()
        loss_sum += loss.detach()
    result = strategy.step(optimizers, loss_sum, num_tokens=len(inputs), max_grad_norm=1.0)
    if mesh.rank == 0 and step % 20 == 0:
        print(f"step {step}: loss {result.loss:.4f}, gradient norm {result.grad_norm:.3f}", flush=True)

if dist.is_initialized():
    dist.destroy_process_group()
