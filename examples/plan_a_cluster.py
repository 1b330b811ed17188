"""Find the best layout of Llama 3 8B on 64 H100: no GPU, no torch, a few seconds.

python examples/plan_a_cluster.py
"""

import phalanx

WORLD_SIZE = 64
GIB = 2**30

run = phalanx.run_from_table(
    {
        "model": {"preset": "llama3-8b"},
        "cluster": {"preset": "h100", "nproc_per_node": 8},
        "training": {"seq_len": 8192, "tokens_per_step": 4_194_304},
    }
)

plan = phalanx.plan_run(run, WORLD_SIZE, top=5)
print(f"{plan.searched:,} layouts searched, {plan.fitting:,} likely to fit")
for layout in plan.layouts:
    memory = f"{layout.memory_bytes / GIB:.0f} GiB, P(OOM) {layout.p_oom:.1%}"
    print(f"{layout.step_seconds:.2f} s, MFU {layout.mfu:.0%}, {memory}: {layout.candidate}")

mine = phalanx.predict(run, WORLD_SIZE, "data_parallel=zero3,micro_batch_size=1,activation_checkpointing=full")
print(f"full sharding with full recomputation: {mine.step_seconds / plan.best.step_seconds:.2f} x the best step")

best = run.replace(layout=plan.best.layout)
for role, rank in phalanx.memory(best, WORLD_SIZE).items():
    print(f"{role}: {rank.parameters / GIB:.1f} GiB parameters, {rank.optimizer / GIB:.1f} GiB optimizer state")
for role, collectives in phalanx.traffic(best, WORLD_SIZE).items():
    for row in collectives:
        print(f"{role} sends {row.bytes / GIB:.2f} GiB in {row.calls} x {row.operation} ({row.purpose})")
