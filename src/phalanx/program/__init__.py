"""Order and grouping of a rank's work, which the trainer follows and the cost model counts."""
