"""Module that simulates an initialized GPU, which forked processes cannot use."""

import torch

torch.cuda._is_in_bad_fork = lambda: True
