"""Any module trains here: a ResNet-18 from `transformers` learns scikit-learn's handwritten digits.

    python examples/resnet_digits.py                                          # one process
    torchrun --nproc-per-node 2 examples/resnet_digits.py zero2               # or ddp, zero1, zero3
    torchrun --nproc-per-node 4 examples/resnet_digits.py hsdp --dp-shard 2
    torchrun --nproc-per-node 3 examples/resnet_digits.py parameter_server    # a server and two workers

It needs transformers and scikit-learn: pip install '.[examples]'
"""

import argparse
from typing import get_args

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from transformers import ResNetConfig, ResNetForImageClassification

import phalanx
from phalanx.launch.process import exit_rank

BATCH = 64  # images per step, over all ranks
EPOCH = 24 * BATCH  # images to learn from; the other 261 are the test

parser = argparse.ArgumentParser()
ways = get_args(phalanx.Layout.model_fields["data_parallel"].annotation)
parser.add_argument("data", nargs="?", default="ddp", choices=ways, help="the data parallelism")
parser.add_argument("--dp-shard", type=int, help="ranks that share one copy (hsdp)")
parser.add_argument("--steps", type=int, default=72)
options = parser.parse_args()

device = phalanx.init_distributed()
layout = phalanx.Layout(data_parallel=options.data, dp_shard=options.dp_shard)
mesh = phalanx.build_mesh(layout)
torch.manual_seed(0)  # every rank makes the same weights, and the same batches to take its share of

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
images = F.interpolate(images, scale_factor=4)  # of 8 x 8 pixels, ResNet's stem would leave 2 x 2
labels = torch.tensor(digits.target, device=device)
learn, test = torch.randperm(len(labels)).tensor_split([EPOCH])

sizes = {"depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512], "layer_type": "basic"}  # ResNet-18's
model = ResNetForImageClassification(ResNetConfig(num_channels=1, num_labels=10, **sizes))
strategy = phalanx.distribute(model, layout, mesh, device, blocks=list(model.resnet.encoder.stages))
optimizers = (
    [torch.optim.AdamW(strategy.trainable_parameters.values(), lr=1e-4)] if strategy.trainable_parameters else []
)  # a worker has none

epochs = -(-options.steps * BATCH // EPOCH)
batches = torch.cat([learn[torch.randperm(EPOCH)] for _ in range(epochs)]).split(BATCH)
for step, batch in enumerate(batches[: options.steps], start=1):
    loss, count = torch.zeros((), device=device), 0
    if strategy.runs_model:  # a parameter server does not
        mine = batch[mesh.dp_rank :: mesh.dims.dp_size]
        with strategy.accumulate():
            loss = F.cross_entropy(strategy.model(images[mine]).logits, labels[mine], reduction="sum")
            loss.backward()
        count = len(mine)
    # Losses and gradients are summed over ranks, and divided by the images of the whole batch.
    result = strategy.step(optimizers, loss, num_tokens=count, max_grad_norm=1.0)
    if mesh.rank == 0 and step % 8 == 0:
        print(f"step {step:3}: training loss {result.loss:.4f}", flush=True)

strategy.drain_pending_updates()
# BatchNorm normalizes each rank's share by itself, so its running statistics differ from rank to rank: the first that
# computes speaks for its own. All evaluate, for with zero3 no rank has all the parameters.
strategy.model.eval()
if strategy.runs_model:
    with torch.no_grad():
        right = strategy.model(images[test]).logits.argmax(dim=1) == labels[test]
    if mesh.dp_rank == 0:
        print(f"test accuracy {right.float().mean():.1%}", flush=True)
exit_rank(0)
