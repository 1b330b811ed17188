"""Parameter server (Li et al., OSDI 2014): servers own parameters and their state, workers compute.

Workers have the frozen parameters, which are never sent.

A step has four parts. Servers broadcast the weights; each worker runs its forward and backward passes. Servers add the
workers' gradients, in the order of the workers, and divide them by the number of tokens; servers update. The first
ranks are the servers, and parameters are assigned to them by bytes. A worker has only weights and gradients, whatever
the optimizer. Messages pass through CPU memory and gloo: servers need no GPU, and GPUs need not reach each other.

Asynchronously (`layout.max_staleness` = s; bounded delay, section 3.4 of the paper) a worker continues while its
weights lack at most s updates. Each update still uses one gradient of every worker, and received weights are used
immediately. A server then needs memory for s + 1 gradients of every worker and s + 1 copies of its weights."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.parallel.data.parameter_server_messages import (
    MessagePair,
    ServerTopology,
    first_tag,
    flatten_parameters,
    irecv,
    parameter_views,
    receive_buffer,
    router_biases,
    send_pair,
)
from phalanx.parallel.data.zero_parameters import trainable_parameters_of
from phalanx.parallel.grad_norm import global_grad_norm
from phalanx.parallel.module_tensors import named_parameters, optimizer_state_tensors, place_buffers, replace_parameter
from phalanx.parallel.strategy import StepReduction, Strategy
from phalanx.spec.errors import UserError
from phalanx.spec.layout import Layout, assign_parameters_to_servers


def build_parameter_server(module: nn.Module, layout: Layout, device: torch.device) -> Strategy:
    """Return this rank's strategy, a server or a worker.

    Workers use `device`, servers use the CPU. Raises UserError if the trained parameters have more than one dtype."""
    types = {parameter.dtype: name for name, parameter in trainable_parameters_of(named_parameters(module))}
    if len(types) > 1:
        description = " and ".join(f"{name} in {dtype}" for dtype, name in types.items())
        problem = f"sends parameters as one vector of one dtype, but the module has {description}"
        fix = "convert the module to one dtype, or use another layout.data_parallel"
        raise UserError("layout.data_parallel", layout.data_parallel, problem, fix)
    servers = list(range(layout.num_servers))
    workers = list(range(layout.num_servers, dist.get_world_size()))
    shapes = {name: parameter.shape for name, parameter in trainable_parameters_of(named_parameters(module))}
    owner = assign_parameters_to_servers({name: shape.numel() for name, shape in shapes.items()}, layout.num_servers)
    # Servers use CPU memory, whatever the workers' device; a dry run has only its own backend.
    backend = "fake" if dist.get_backend() == "fake" else "gloo"
    roles = ServerTopology(
        servers=servers,
        workers=workers,
        owned=[{name: shape for name, shape in shapes.items() if owner[name] == server} for server in servers],
        groups=[dist.new_group([server, *workers], backend=backend) for server in servers],
        server_group=dist.new_group(servers, backend=backend),
        staleness=layout.max_staleness,
    )
    is_server = dist.get_rank() in servers
    return ParameterServer(module, roles) if is_server else ParameterServerWorker(module, roles, device)


class ParameterServerWorker(Strategy):
    """A rank that computes gradients and trains no parameters."""

    def __init__(self, module: nn.Module, roles: ServerTopology, device: torch.device) -> None:
        parameters = dict(named_parameters(module))
        self.weights = [flatten_parameters(parameters, shapes, device) for shapes in roles.owned]
        """One vector per server of its parameters; the model's parameters are views."""
        self.sums = [torch.zeros_like(weights) for weights in self.weights]
        """One vector per server of summed gradients."""
        for parameter in parameters.values():
            if not parameter.requires_grad:
                value = torch.empty_like(parameter, device=device) if parameter.is_meta else parameter.to(device)
                replace_parameter(module, parameter, nn.Parameter(value, requires_grad=False))
        for shapes, weights, sums in zip(roles.owned, self.weights, self.sums, strict=True):
            gradients = parameter_views(sums, shapes)
            for name, view in parameter_views(weights, shapes).items():
                parameter = nn.Parameter(view)
                parameter.grad = gradients[name]
                replace_parameter(module, parameters[name], parameter)
        place_buffers(module, device)
        super().__init__(module)
        self.trainable_parameters = {}
        self.roles = roles
        self.biases = router_biases(module)
        self.steps_sent = 0
        """Number of steps whose gradients were sent."""
        self.versions = [0] * len(roles.servers)
        """Number of updates in the weights of each server."""
        self._posted_receives: list[tuple[dist.Work, Tensor] | None] = [None] * len(roles.servers)
        self._newest_values = torch.zeros(2)
        """Version, gradient norm and sums of the last received update."""
        self._message_size = 2

    def reduce(self, sums: Tensor, clip_norm: float = 0.0) -> StepReduction:
        """Send this step's gradients, and receive the available and the required weights."""
        message = torch.cat([sums, sums.new_tensor([min(self.versions)])]).cpu()
        sent = [gradients.cpu() for gradients in self.sums]
        works = []
        for server, gradients in zip(self.roles.servers, sent, strict=True):
            works += send_pair(message, gradients, server, first_tag(self.steps_sent))
        self.steps_sent += 1
        self._message_size = 2 + len(sums)
        if self.roles.staleness is None:
            self._receive_broadcast()
        else:
            self._receive_updates(self.steps_sent - self.roles.staleness)
        with self.comm_wait.measure():
            for work in works:
                work.wait()
        for gradients in self.sums:
            gradients.zero_()
        # A synchronous worker has just received this step's update.
        version = self.steps_sent if self.roles.staleness is None else int(self._newest_values[0])
        # Before the first update, this rank reports its own sums.
        reported_sums = self._newest_values[2:].to(sums.device) if version else sums
        return StepReduction(norm=self._newest_values[1], sums=reported_sums, steps_behind=self.steps_sent - version)

    def update(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """No-op: the servers run the optimizer."""

    def zero_grad(self) -> None:
        """No-op: gradients have already been sent."""

    def sync_model_weights(self) -> None:
        """Receive the weights of all servers."""
        self._receive_broadcast()

    def drain_pending_updates(self) -> None:
        """Receive the updates of all sent steps."""
        self._receive_updates(self.steps_sent)

    def _receive_broadcast(self) -> None:
        header = self._allocate_header()
        with self.comm_wait.measure():
            dist.broadcast(header, self.roles.servers[0], group=self.roles.groups[0])
            for server, group, weights in zip(self.roles.servers, self.roles.groups, self.weights, strict=True):
                received = receive_buffer(weights)
                dist.broadcast(received, server, group=group)
                weights.copy_(received)
        self.versions = [self.steps_sent] * len(self.versions)
        self._parse_header(header)

    def _receive_updates(self, needed: int) -> None:
        """Receive the first `needed` updates of every server, and all later ones that have already arrived."""
        for index in range(len(self.roles.servers)):
            while self.versions[index] < self.steps_sent:
                _, header = self._post_header(index)
                # Gloo reports an arrival only to a waiting receiver; the header's first number shows it before.
                if self.versions[index] >= needed and header[0] < 0:
                    break
                self._receive_update(index)

    def _post_header(self, index: int) -> tuple[dist.Work, Tensor]:
        """Return the pending receive of a server's next header, and start it if there is none."""
        posted = self._posted_receives[index]
        if posted is None:
            header = self._allocate_header()
            tag = first_tag(self.versions[index] + 1)
            posted = irecv(header, self.roles.servers[index], tag), header
            self._posted_receives[index] = posted
        return posted

    def _receive_update(self, index: int) -> None:
        """Receive the next weights of a server, whose header is posted."""
        work, header = self._post_header(index)
        received = receive_buffer(self.weights[index])
        with self.comm_wait.measure():
            work.wait()
            dist.recv(received, self.roles.servers[index], tag=first_tag(self.versions[index] + 1) + 1)
        self.weights[index].copy_(received)
        self.versions[index] += 1
        self._posted_receives[index] = None
        if index == 0:
            self._parse_header(header)

    def _allocate_header(self) -> Tensor:
        """Return a buffer for version, gradient norm, sums and router biases."""
        size = self._message_size + sum(bias.numel() for bias in self.biases)
        return torch.full((size,), -1.0, dtype=torch.float64)

    def _parse_header(self, header: Tensor) -> None:
        self._newest_values, *biases = header.split([self._message_size, *(bias.numel() for bias in self.biases)])
        for bias, received in zip(self.biases, biases, strict=True):
            bias.copy_(received)


class ParameterServer(Strategy):
    """A rank that trains its share of the parameters with the workers' gradients."""

    runs_model = False

    def __init__(self, module: nn.Module, roles: ServerTopology) -> None:
        parameters = dict(named_parameters(module))
        cpu = torch.device("cpu")
        shapes = roles.owned[dist.get_rank()]
        self.weights = flatten_parameters(parameters, shapes, cpu)
        self.sum = torch.zeros_like(self.weights)
        gradients = parameter_views(self.sum, shapes)
        trained = {}
        for name, view in parameter_views(self.weights, shapes).items():
            trained[name] = nn.Parameter(view)
            trained[name].grad = gradients[name]
        for parameter in parameters.values():
            replace_parameter(
                module, parameter, nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            )
        place_buffers(module, cpu)
        super().__init__(module)
        self.trainable_parameters = trained
        self.frozen_parameters = {}
        self.roles = roles
        self.biases = router_biases(module)
        self.steps_done = 0
        """Number of updates."""
        self._header = torch.zeros(2, dtype=torch.float64)
        self._receive_buffer: Tensor | None = None
        self._posted_receives: dict[int, deque[MessagePair]] = defaultdict(deque)
        self._pending_sends: deque[MessagePair] = deque()

    def gradients(self) -> dict[str, Tensor]:
        """Return the summed gradient of this server's parameters."""
        return {"all": self.sum}

    def reduce(self, sums: Tensor, clip_norm: float = 0.0) -> StepReduction:
        """Add the workers' gradients and sums to `sums`, which are 0 except for this server's requests."""
        total = sums.double().cpu()
        oldest_version = self.steps_done
        for worker in self.roles.workers:
            message, gradients = self._receive_gradients(worker, len(sums) + 1)
            total += message[:-1]
            self.sum.copy_(gradients) if worker == self.roles.workers[0] else self.sum.add_(gradients)
            if self.roles.staleness is not None:
                oldest_version = min(oldest_version, int(message[-1]))
                self._post_receive(worker, message, gradients, steps_ahead=1 + self.roles.staleness)
        square = global_grad_norm([self.sum]).double().square()
        with self.comm_wait.measure():
            dist.all_reduce(square, group=self.roles.server_group)
        norm = self.normalize_and_clip(square.sqrt(), total[0], clip_norm)
        self._header = torch.cat([total.new_tensor([self.steps_done + 1.0]), norm[None], total])
        return StepReduction(norm=norm, sums=total.to(sums.device), staleness=self.steps_done - oldest_version)

    def update(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Step the optimizers, and send the weights."""
        for optimizer in optimizers:
            optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Finish the step, with or without an update: the workers wait for its weights."""
        self.steps_done += 1
        self._broadcast_weights() if self.roles.staleness is None else self._send_weights()

    def sync_model_weights(self) -> None:
        """Broadcast the weights with an empty header."""
        self._header = torch.zeros(2, dtype=torch.float64)
        self._broadcast_weights()

    def resident_tensors(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, list[Tensor]]:
        """Return the persistent tensors of this rank by part."""
        received = [pair.vector for posted in self._posted_receives.values() for pair in posted]
        staging_buffers = [] if self._receive_buffer is None else [self._receive_buffer]
        return {
            "parameters": [self.weights, *self.carried_tensors],
            "gradients": [self.sum],
            "optimizer": optimizer_state_tensors(optimizers),
            "communication": [*staging_buffers, *received, *(pair.vector for pair in self._pending_sends)],
        }

    def drain_pending_updates(self) -> None:
        """Wait for all pending sends."""
        self._finish_sending(max_pending=0)

    def _finish_sending(self, max_pending: int) -> None:
        while len(self._pending_sends) > max_pending:
            self._pending_sends.popleft().wait()

    def _receive_gradients(self, worker: int, size: int) -> tuple[Tensor, Tensor]:
        """Return the next message of a worker and its gradients. Asynchronous servers post their receives ahead."""
        if self.roles.staleness is None:
            self._receive_buffer = torch.empty_like(self.sum) if self._receive_buffer is None else self._receive_buffer
            self._post_receive(worker, torch.empty(size, dtype=torch.float64), self._receive_buffer, steps_ahead=0)
        elif not self._posted_receives[worker]:
            for steps_ahead in range(1 + self.roles.staleness):
                message = torch.empty(size, dtype=torch.float64)
                self._post_receive(worker, message, torch.empty_like(self.sum), steps_ahead)
        pair = self._posted_receives[worker].popleft()
        with self.comm_wait.measure():
            pair.wait()
        return pair.message, pair.vector

    def _post_receive(self, worker: int, message: Tensor, gradients: Tensor, steps_ahead: int) -> None:
        """Start to receive the message that a worker sends `steps_ahead` steps from now."""
        tag = first_tag(self.steps_done + steps_ahead)
        works = [irecv(message, worker, tag), irecv(gradients, worker, tag + 1)]
        self._posted_receives[worker].append(MessagePair(message, gradients, works))

    def _build_message(self) -> Tensor:
        return torch.cat([self._header, *(bias.double() for bias in self.biases)])

    def _broadcast_weights(self) -> None:
        rank = dist.get_rank()
        with self.comm_wait.measure():
            if rank == self.roles.servers[0]:
                dist.broadcast(self._build_message(), rank, group=self.roles.groups[rank])
            dist.broadcast(self.weights, rank, group=self.roles.groups[rank])

    def _send_weights(self) -> None:
        """Send each worker a copy of the weights, which continue to change."""
        # Servers have already waited for workers that are further behind.
        self._finish_sending(max_pending=self.roles.staleness or 0)
        message = self._build_message()
        weights = self.weights.clone()
        works = []
        for worker in self.roles.workers:
            works += send_pair(message, weights, worker, first_tag(self.steps_done))
        self._pending_sends.append(MessagePair(message, weights, works))
