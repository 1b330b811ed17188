"""What a module would leave that has touched a GPU: forks cannot use it."""

import torch

torch.cuda._is_in_bad_fork = lambda: True
