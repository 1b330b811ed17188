"""Log the collectives and messages of this process, and compare the logs of all ranks at the end of each step."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.debug.collective_log import SAME_SIZE_COLLECTIVES, is_user_code
from phalanx.debug.collective_order import COLLECTIVE, MESSAGE, CollectiveOrder, LoggedCall, is_check_enabled
from phalanx.parallel.comm.objects import all_gather_objects
from phalanx.runs.errors import CollectiveOrderError
from phalanx.runs.hang_dumps import calls_file, format_frame
from phalanx.spec.files.replace import open_no_link
from phalanx.train.profiling.collective_recorder import OPERATION_NAMES, ranks_of_group

Data = TypeVar("Data")
Record = TypeVar("Record")

INPUT_ARGUMENTS = ("input_tensors", "input_tensor", "input_list", "inputs", "input", "tensors")
"""Names of the arguments with a rank's input in the schemas of the operations."""
UNORDERED_OPERATIONS = ("recv_any_source_", "check_for_nan")
"""Operations without an order: a receive from any rank, and an operation that is not a collective."""


_is_user_code = lru_cache(maxsize=1024)(is_user_code)


@lru_cache(maxsize=1024)
def _format_line(*frame: Any) -> str:
    return format_frame(frame)


class CollectiveLog:
    """The log of this process; each call is in the file before it starts."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._numbers: dict[LoggedCall, int] = {}
        self._training_thread = threading.get_ident()
        # A background thread that saves a checkpoint logs its collectives too.
        self._lock = threading.Lock()
        # A kernel on autograd's key runs before those of every device, and autograd has none for these operations.
        self._library = torch.library.Library("c10d", "IMPL")
        for full_name in torch._C._dispatch_get_all_op_names():
            namespace, _, name = full_name.partition("::")
            if namespace == "c10d" and name not in UNORDERED_OPERATIONS:
                operation = getattr(torch.ops.c10d, name).default
                arguments = [argument.name for argument in operation._schema.arguments]
                kernel = partial(self._log_and_call, operation, OPERATION_NAMES.get(name, name.strip("_")), arguments)
                self._library.impl(operation, kernel, "Autograd", with_keyset=True)

    def open(self, file: Path) -> None:
        """Start to log to a file, which is truncated; a link in its place is replaced, not followed."""
        self.close()
        self._numbers.clear()
        if file.is_symlink():
            file.unlink()
        # Without a buffer: calls must be in the file, however the process exits.
        self._file = open(file, "wb", buffering=0, opener=open_no_link)  # noqa: SIM115 -- closed by `close`

    def close(self) -> None:
        """Stop logging."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None

    def _log_and_call(
        self, operation: Any, name: str, argument_names: Sequence[str], keys: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._file is not None:
            # Optional arguments may be missing.
            call = _describe_call(name, dict(zip(argument_names, args, strict=False)), self._training_thread)
            with self._lock:
                number = self._numbers.get(call)
                if number is None:
                    self._numbers[call] = len(self._numbers)
                if self._file is not None:
                    self._file.write(f"{call.to_json() if number is None else number}\n".encode())
        return operation.redispatch(keys & torch._C._after_autograd_keyset, *args, **kwargs)


def _describe_call(name: str, arguments: dict[str, Any], training_thread: int) -> LoggedCall:
    group = dist.ProcessGroup.unbox(arguments["process_group"]).group_name
    ranks = ranks_of_group(group)
    size, dtype = _measure_input(arguments)
    caller = _find_calling_line()
    if name in ("send", "recv"):
        local_rank = dist.get_rank()
        peer = ranks[arguments["dst" if name == "send" else "src"]]
        link = (local_rank, peer) if name == "send" else (peer, local_rank)
        signature = f"{size:,} {dtype} with tag {arguments['tag']}"
        return LoggedCall(kind=MESSAGE, group=group, ranks=link, signature=signature, caller=caller)
    signature = f"{name} of {size:,} {dtype}" if name in SAME_SIZE_COLLECTIVES else f"{name} {dtype}".rstrip()
    if "root_rank" in arguments:
        signature += f" with root {ranks[arguments['root_rank']]}"
    sent, received = _all_to_all_sizes(arguments, len(ranks)) if name == "all_to_all" else ((), ())
    # Threads that Python started; backward passes on a GPU run in threads of autograd, which PyTorch starts.
    thread = threading.get_ident()
    in_background = thread != training_thread and any(
        python_thread.ident == thread for python_thread in threading.enumerate()
    )
    return LoggedCall(
        kind=COLLECTIVE,
        group=group,
        ranks=ranks,
        signature=signature,
        caller=caller,
        sent=sent,
        received=received,
        in_background=in_background,
    )


def _measure_input(arguments: dict[str, Any]) -> tuple[int, str]:
    """Return the number of elements and the dtype of a rank's input to a collective."""
    inputs = next((arguments[name] for name in INPUT_ARGUMENTS if name in arguments), ())
    # Only the root of a scatter has an input.
    tensors = _flatten_tensors(inputs) or _flatten_tensors(arguments.get("output_tensors", ()))
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    return sum(tensor.numel() for tensor in tensors), dtype


def _flatten_tensors(tensors: Any) -> list[Tensor]:
    """Return the tensors of a list, or of a list of lists."""
    return (
        [tensors] if isinstance(tensors, Tensor) else [tensor for item in tensors for tensor in _flatten_tensors(item)]
    )


def _all_to_all_sizes(arguments: dict[str, Any], ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the numbers of elements that a rank sends to each rank, and that it receives from each."""
    if "input_tensors" in arguments:
        sent, received = (arguments[f"{side}_tensors"] for side in ("input", "output"))
        return tuple(tensor.numel() for tensor in sent), tuple(tensor.numel() for tensor in received)

    def elements_per_rank(tensor: Tensor, rows: Sequence[int]) -> tuple[int, ...]:
        return tuple(count * prod(tensor.shape[1:]) for count in rows or [len(tensor) // ranks] * ranks)

    sent = elements_per_rank(arguments["input"], arguments["input_split_sizes"])
    return sent, elements_per_rank(arguments["output"], arguments["output_split_sizes"])


def _find_calling_line() -> str:
    """Return the innermost calling line outside of PyTorch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not _is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    return _format_line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


LATE_FILE_SECONDS = 10.0
LATE_FILE_POLL_SECONDS = 0.1


class OrderGuard:
    """Checks the order of collectives from `__enter__` to `__exit__`; a no-op unless enabled."""

    def __init__(self, directory: Path) -> None:
        """Create the guard of a run directory, at the same point of the collectives on all ranks."""
        self._directory = directory
        self._log: CollectiveLog | None = None
        self._order: CollectiveOrder | None = None

    def __enter__(self) -> Self:
        if is_check_enabled() and dist.is_initialized():
            file = calls_file(self._directory, dist.get_rank())
            file.parent.mkdir(exist_ok=True)
            self._log = CollectiveLog()
            self._log.open(file)
            if dist.get_rank() == 0:
                ranks = range(dist.get_world_size())
                self._order = CollectiveOrder({rank: calls_file(self._directory, rank) for rank in ranks})
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._log is None:
            return
        self._log.close()
        if error is not None:
            return
        file = calls_file(self._directory, dist.get_rank())
        self._check_whole_logs(all_gather_objects(file.stat().st_size))
        # The first rank has then read the files of the others.
        dist.barrier()
        file.unlink()
        with suppress(OSError):  # other ranks have files there
            file.parent.rmdir()

    def after_each(self, step: Callable[[Data], Record]) -> Callable[[Data], Record]:
        """Return `step` followed by the check."""

        def step_and_check(data: Data) -> Record:
            record = step(data)
            self._check_order()
            return record

        return step if self._log is None else step_and_check

    def _check_whole_logs(self, sizes: Sequence[int]) -> None:
        """Compare the full logs of all ranks, in files of these sizes, as far as they are visible.

        A shared file system may show files late. Without one, only the files of this node are visible."""
        deadline = time.monotonic() + LATE_FILE_SECONDS
        late_ranks = list(range(len(sizes)))
        while self._order is not None and late_ranks and time.monotonic() < deadline:
            self._check_order()
            late_ranks = [rank for rank in late_ranks if self._order.bytes_read(rank) < sizes[rank]]
            time.sleep(LATE_FILE_POLL_SECONDS if late_ranks else 0.0)
        self._check_order(finished=[rank for rank in range(len(sizes)) if rank not in late_ranks])

    def _check_order(self, finished: Collection[int] = ()) -> None:
        """Raise CollectiveOrderError on the first rank if the calls of ranks differ."""
        difference = self._order.first_difference(finished) if self._order is not None else None
        if difference is not None:
            raise CollectiveOrderError(difference.message, difference.ranks)
