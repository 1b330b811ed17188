"""Job files for schedulers: the common description in `job.py`, and one module per system.

Each module has a function that returns the job file. All files start the same command on every node:

phalanx train RUN.toml --nodes N --rendezvous HOST:PORT --nproc GPUS --resume

All depend on its exit code: 0 the last step is reached, 2 the user must change something, 75 the run was stopped and
saved and must be restarted, any other value a failure. The package does not need torch.
"""
