"""A callback: give the weights of a run in training to a process that generates with them, every few steps.

The process has a model of transformers; an inference engine takes the same names and tensors (`load_weights` of vLLM).
Try it from this directory: `phalanx train update_engine.toml --nproc 2`
"""

from multiprocessing import get_context

import torch

import phalanx
from phalanx.spec.families.config_json import hf_config


def generate_forever(pipe, config, prompt, new_tokens):
    """Receive weights, continue the prompt and return the tokens, until the pipe is closed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    weights = model.state_dict()
    while message := pipe.recv():
        name, tensor = message
        if name is not None:
            weights[name].copy_(torch.from_numpy(tensor))
            continue
        tokens = torch.tensor([list(prompt.encode())])
        pipe.send(model.generate(tokens, max_new_tokens=new_tokens, do_sample=False)[0].tolist())


class UpdateEngine(phalanx.Callback):
    """Rank 0 has the engine; all ranks have a part in gathering the weights, whatever the layout."""

    def __init__(self, every: int = 10, prompt: str = "def ", new_tokens: int = 24) -> None:
        self.every = every
        self.settings = prompt, new_tokens
        self.pipe = None

    def is_due(self, trainer):
        return trainer.step % self.every == 0

    def on_train_start(self, trainer):
        if trainer.is_main:
            self.pipe, theirs = get_context("spawn").Pipe()
            arguments = theirs, hf_config(trainer.run.model), *self.settings
            get_context("spawn").Process(target=generate_forever, args=arguments, daemon=True).start()
            theirs.close()  # so that an engine that has ended is an error here

    def on_step_end(self, trainer, record):
        for name, tensor in trainer.model_weights():  # one at a time, and the next one only when all ranks ask for it
            if self.pipe is not None:
                self.pipe.send((name, tensor.cpu().numpy()))
        if self.pipe is not None:
            self.pipe.send((None, None))
            trainer.progress.log(f"step {trainer.step}: {bytes(self.pipe.recv())!r}")

    def on_train_end(self, trainer, record):
        if self.pipe is not None:
            self.pipe.send(None)
