"""Train a tiny transformer on two ranks of a CPU, compare it with its prediction, and sample from it (a minute).

python examples/train_tiny.py
"""

import json
from pathlib import Path

import torch

import phalanx

run = phalanx.run_from_table(
    {
        "name": "tiny",
        "model": {"preset": "tiny", "hidden_size": 64, "num_layers": 2, "num_heads": 4, "ffn_hidden_size": 128},
        "data": {"train": [str(Path(json.__file__).parent)], "tokenizer": "bytes"},
        "training": {"steps": 40, "seq_len": 64, "tokens_per_step": 1024, "precision": "fp32"},
        "layout": {"data_parallel": "zero2"},
        "cluster": {"device": "cpu"},
    }
)

result = phalanx.train_run(run, nproc=2, profile_memory=True)
print(f"{result.exit_reason} after step {result.metrics['step']}, held-out loss {result.held_out_loss:.3f}")

report = result.report()
print(f"bottleneck: {report.bottleneck}")
for row in report.comparison:
    if row["predicted"] and row["measured"]:
        measured = f"{row['measured']:>14,.4g} {row['unit']:3}"
        print(f"{row['role']:6} {row['quantity']:24} {measured} {row['ratio']:.3f} x predicted")

model, tokenizer = phalanx.load_model(result.run_dir)
prompt = torch.tensor(tokenizer.encode_batch(["def "])[0])
print(tokenizer.decode(phalanx.generate(model, prompt, 60, temperature=0.8, vocab=tokenizer.vocab).tolist()))
