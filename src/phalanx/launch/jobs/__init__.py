"""A run as a job of what shares out machines: `job.py` what is asked for, and one file for each of these systems, whose
function writes the file that it is given. All start the same command on every node:

    phalanx train RUN.toml --nodes N --rendezvous HOST:PORT --nproc GPUS --resume

and all go by its exit code: 0 the last step is reached, 2 the user must change something, 75 it was stopped, has saved
and is to be started again, anything else a failure. Nothing here needs torch."""
