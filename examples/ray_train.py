"""A run whose ranks are workers of Ray Train: python examples/ray_train.py RUN.toml 2

Paths in the run file are absolute, because workers run in directories of Ray, and on a disk that all workers share.
"""

import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import phalanx


def train_rank(config: dict) -> None:
    result = phalanx.run_rank(config["run"], resume=True)
    ray.train.report({"loss": result.metrics["loss"], "run_dir": str(result.run_dir)})


run = phalanx.load_run(sys.argv[1])
on_gpus = run.cluster.device != "cpu"
trainer = TorchTrainer(
    train_rank,
    train_loop_config={"run": run},
    torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if on_gpus else "gloo"),
    scaling_config=ScalingConfig(num_workers=int(sys.argv[2]), use_gpu=on_gpus),
    # Ray starts failed workers again, and resume=True continues from the newest checkpoint.
    run_config=RunConfig(
        name=f"{run.name}-ray", storage_path=run.output_dir, failure_config=FailureConfig(max_failures=3)
    ),
)
trainer.fit()
