"""Data parallelism: DDP, ZeRO, FSDP, parameter server, offload."""
