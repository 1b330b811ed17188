"""Expert parallelism and partially trained experts."""
