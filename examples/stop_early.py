"""A callback: end a run when its held-out loss has not improved for some evaluations.

Try it from this directory: `phalanx train early.toml`, with these lines in early.toml:

    [callbacks.stop_early]
    class = "stop_early:StopEarly"
    patience = 3
"""

import math

import phalanx


class StopEarly(phalanx.Callback):
    """Ends the run after `patience` evaluations without a better loss."""

    def __init__(self, patience: int = 3) -> None:
        self.patience = patience
        self.start_over(held_out_set=None)

    def start_over(self, held_out_set):
        self.held_out_set = held_out_set
        self.best = math.inf
        self.without_gain = 0

    def on_evaluation_end(self, trainer, record):
        if record["held_out_set"] != self.held_out_set:  # losses on other text are not comparable
            self.start_over(record["held_out_set"])
        improved = record["held_out_loss"] < self.best
        self.best = min(self.best, record["held_out_loss"])
        self.without_gain = 0 if improved else self.without_gain + 1
        if self.without_gain >= self.patience:
            trainer.finish(f"no better loss than {self.best:.4f} in {self.patience} evaluations")

    def state_dict(self):
        return {"held_out_set": self.held_out_set, "best": self.best, "without_gain": self.without_gain}

    def load_state_dict(self, state):
        self.held_out_set = state["held_out_set"]
        self.best = state["best"]
        self.without_gain = state["without_gain"]
