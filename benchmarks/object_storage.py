"""Plant faults between runs and an object store, and compare times of checkpoints there and in a local directory.

    python -m benchmarks.object_storage   # minutes; prints the tables; writes docs/results/benchmarks/object_storage.md

The store is moto's server of S3, behind a proxy that plants the faults. It needs the environment of `make test-cloud`.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load

from benchmarks.pages import write_results
from phalanx.data import places
from phalanx.data.object_cache import use_object_cache
from phalanx.data.sources import documents, list_source_files, read_documents
from phalanx.launch.preflight import preflight
from phalanx.runs.checkpoint_store import is_stored
from phalanx.runs.checkpoints import checkpoints
from phalanx.spec.errors import UserError
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import DataSpec, KeepSpec, RunSpec
from phalanx.train.checkpoint.checkpointer import Checkpointer
from phalanx.train.checkpoint.stored_reader import open_checkpoint
from tests.helpers.faulty_proxy import Fault, Proxy
from tests.helpers.s3_server import client, list_keys, make_bucket, s3_server
from tests.helpers.small_runs import make_trainer, small_run, train_until
from tests.helpers.stored_runs import forget_run_directory, stored_steps, train_and_save

PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "object_storage.md"
TEXT = Path(json.__file__).parent
BUCKET = "checkpoints"
SHARD = r".*\.safetensors"
MANY = 10**6
STATE_BYTES = 64 * 2**20
REPEATS = 3


class Table:
    """Rows of faults, each on fresh buckets."""

    def __init__(self, server: Proxy, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.rows: list[tuple[str, str, str]] = []
        self.expected = train_until(make_trainer(small_run(TEXT, folder / "local", {})), 6)

    @contextmanager
    def fault(self, name: str) -> Iterator[tuple[RunSpec, list[str]]]:
        """Yield a run of fresh buckets and a list for the results of a fault, and add its row."""
        self.server.plant()
        make_bucket("corpus")
        for file in sorted(TEXT.glob("*.py")):
            client().put_object(Bucket="corpus", Key=f"text/{file.name}", Body=file.read_bytes())
        store = make_bucket(BUCKET)
        folder = self.folder / str(len(self.rows))
        use_object_cache(DataSpec(cache=str(folder / "cache")))
        run = small_run(TEXT, folder, {"checkpoint.directory": f"{store}/team"})
        results: list[str] = []
        yield run.replace(data=run.data.replace(cache=str(folder / "cache"))), results
        self.server.plant()
        kind, _, rest = name.partition(": ")
        self.rows.append((kind, rest, "; ".join(results)))
        print(" | ".join(self.rows[-1]), flush=True)

    def reading_of_data(self) -> None:
        """Read a corpus through faults."""
        expected = [document.text for document in documents([f"{TEXT}/*.py"])]
        for name, kind in (
            ("HTTP 500 for two requests", "error"),
            ("connection cut in two objects", "cut"),
            ("two objects arrive truncated", "truncated"),
            ("a flipped bit in two objects", "corrupt"),
            ("two answers 3 s late, beyond the timeout of 1 s", "slow"),
        ):
            with self.fault(f"data: {name}") as (_, results):
                fault = Fault(kind, "GET /corpus/text/", times=2, seconds=3)  # type: ignore[arg-type]
                self.server.plant(fault)
                text = [document.text for document in documents(["s3://corpus/text/*.py"])]
                assert (text, fault.hits) == (expected, 2)
                results.append(f"{fault.hits} requests repeated; the documents are those of local files")
        for name, kind in (("no permission", "denied"), ("clock of this machine is wrong", "skewed")):
            with self.fault(f"data: {name}") as (_, results):
                self.server.plant(Fault(kind, "GET", times=MANY))  # type: ignore[arg-type]
                results.append(error_of(lambda: list(documents(["s3://corpus/text/*.py"]))))
        with self.fault("data: an object changes after it was listed") as (_, results):
            source_file = list_source_files(["s3://corpus/text/decoder.py"])[0]
            client().put_object(Bucket="corpus", Key="text/decoder.py", Body=b"other text")
            results.append(error_of(lambda: list(read_documents(source_file))))
        with self.fault("data: a bucket that does not exist") as (_, results):
            results.append(error_of(lambda: list(documents(["s3://no-bucket/text/*.py"]))))

    def writing_of_checkpoints(self) -> None:
        """Save through faults; the run never stops."""
        for name, fault in (
            ("HTTP 500 for two uploads of a shard", Fault("error", f"PUT {SHARD}", times=2)),
            ("connection cut after two uploads", Fault("cut", f"PUT {SHARD}", times=2)),
            ("a flipped bit in two uploads", Fault("corrupt_upload", f"PUT {SHARD}", times=2)),
            ("a flipped bit in an uploaded manifest", Fault("corrupt_upload", "PUT .*manifest")),
            ("no permission to write step 2", Fault("denied", "PUT .*step-00000002", times=MANY)),
            ("clock of this machine is wrong in step 2", Fault("skewed", "PUT .*step-00000002", times=MANY)),
            ("HTTP 500 for all requests of step 2", Fault("error", "step-00000002", times=MANY)),
        ):
            with self.fault(f"write: {name}") as (run, results):
                self.server.plant(fault)
                losses, missing = train_and_save(run, [2])
                results.append(f"missing at the end of the first start: {', '.join(missing) or 'none'}")
                self.server.plant()
                more, missing = train_and_save(run, [4])
                forget_run_directory(run)
                last, _ = train_and_save(run, [6])
                assert losses + more + last == self.expected
                assert (missing, stored_steps(run)) == ([], [4, 6])
                results.append("after the next save: none; resumed from the store with equal losses")

    def reading_of_checkpoints(self) -> None:
        """Resume, from an empty run directory, from checkpoints of steps 2 and 4."""
        for name, kind in (
            ("HTTP 500", "error"),
            ("connection cut in a slice", "cut"),
            ("a slice arrives truncated", "truncated"),
            ("a flipped bit in a slice", "corrupt"),
        ):
            with self.fault(f"read: {name}") as (run, results):
                fault = Fault(kind, f"GET {SHARD}", times=2)  # type: ignore[arg-type]
                results.append(self.resume(run, lambda fault=fault: self.server.plant(fault)))
                assert fault.hits == 2
        for name, damage in (
            (
                "killed between upload and manifest of step 4",
                remove("manifest.json", "SHA256SUMS", "objects"),
            ),
            ("killed before the last file of step 4", remove("SHA256SUMS")),
            ("a shard of step 4 is truncated in the store", change(lambda content: content[:-8])),
            (
                "a bit of a shard of step 4 is flipped in the store",
                change(lambda content: content[:-1] + bytes([content[-1] ^ 1])),
            ),
            ("a shard of step 4 is missing", remove(".safetensors")),
        ):
            with self.fault(f"read: {name}") as (run, results):
                results.append(self.resume(run, damage))
        with self.fault("read: no permission") as (run, results):
            train_and_save(run, [2])
            self.server.plant(Fault("denied", "GET", times=MANY))
            results.append(error_of(lambda: forget_run_directory(run)))
        with self.fault("start: no permission to write") as (run, results):
            self.server.plant(Fault("denied", "PUT", times=MANY))
            results.append(error_of(lambda: preflight(ResolvedRun(run, 1), resume=False)))
        with self.fault("start: the store is unreachable") as (run, results):
            self.server.plant(Fault("error", times=MANY))
            results.append(error_of(lambda: preflight(ResolvedRun(run, 1), resume=False)))

    def resume(self, run: RunSpec, damage: Callable[[], Any]) -> str:
        """Return from which step a run resumes after a damage; its losses must be those of an undisturbed run."""
        losses, _ = train_and_save(run, [2, 4])
        damage()
        forget_run_directory(run)
        trainer = make_trainer(run)
        trainer.resume()
        step = trainer.step
        assert losses[:step] + train_until(trainer, 6) == self.expected
        return f"resumed after step {step} with equal losses"


def remove(*names: str) -> Callable[[], None]:
    """Return a function that removes objects of step 4 whose names contain one of these."""

    def apply() -> None:
        for key in list_keys(BUCKET):
            if "step-00000004" in key and any(name in key for name in names):
                client().delete_object(Bucket=BUCKET, Key=key)

    return apply


def change(damage: Callable[[bytes], bytes]) -> Callable[[], None]:
    """Return a function that damages the shards of step 4."""

    def apply() -> None:
        for key in list_keys(BUCKET):
            if "step-00000004" in key and key.endswith(".safetensors"):
                content = client().get_object(Bucket=BUCKET, Key=key)["Body"].read()
                client().put_object(Bucket=BUCKET, Key=key, Body=damage(content))

    return apply


def error_of(action: Callable[[], Any]) -> str:
    """Return the first line of the error that a user sees; without one, the benchmark fails."""
    try:
        action()
    except UserError as error:
        return f"error before the start: `{str(error).splitlines()[0]}`"
    raise AssertionError("no error was raised")


def time_checkpoints(folder: Path) -> list[tuple[str, float, float, float]]:
    """Return for a local directory and a store: seconds that a save blocks, until it is complete, and of a read."""
    tensors = {f"model.{number}": torch.randn(STATE_BYTES // 16 // 1024, 1024) for number in range(4)}
    rows = []
    for place in ("local directory", "S3 (moto)"):
        store = make_bucket(BUCKET) + "/timed" if place != "local directory" else None
        checkpointer = Checkpointer(folder / place.split()[0], KeepSpec(last=1), store)
        seconds = []
        for repeat in range(REPEATS):
            started_at = time.perf_counter()
            checkpointer.save(repeat + 1, tensors, {})
            blocked = time.perf_counter() - started_at
            checkpointer.wait()
            newest = checkpoints(checkpointer.directory)[0]
            while store and not is_stored(newest):
                time.sleep(0.01)
            complete = time.perf_counter() - started_at
            if store:
                for shard in newest.glob("*.safetensors"):
                    shard.unlink()
            started_at = time.perf_counter()
            read = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
            load(read, storage_reader=open_checkpoint(newest), no_dist=True)
            seconds.append((blocked, complete, time.perf_counter() - started_at))
            assert all(torch.equal(read[name], tensors[name]) for name in tensors)
        checkpointer.finish_uploads(60)
        rows.append((place, *(sorted(values)[REPEATS // 2] for values in zip(*seconds, strict=True))))
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure, and write the page."""
    places.FIRST_DELAY_SECONDS = 0.02
    places.READ_SECONDS = 1
    with s3_server() as server, tempfile.TemporaryDirectory() as folder:
        table = Table(server, Path(folder))
        table.reading_of_data()
        table.writing_of_checkpoints()
        table.reading_of_checkpoints()
        places.READ_SECONDS = 60
        os.environ["AWS_ENDPOINT_URL"] = server.server_url
        type(places.file_system("s3://")).clear_instance_cache()
        times = time_checkpoints(Path(folder))
    lines = [
        "# Object storage: faults and times",
        "",
        "| part | fault | result |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in table.rows),
        "",
        "- The store is moto's server of S3, behind a proxy that plants the faults. Runs have one rank, and save after",
        "  steps 2, 4 and 6.",
        '- "Equal losses" are bit for bit those of a run with local files that nothing disturbed. Runs resume with an',
        "  empty run directory, as on another machine.",
        "- Delays between attempts are shortened (0.02 s before the second attempt, in place of 0.5 s).",
        "",
        f"## A checkpoint of {STATE_BYTES // 2**20} MiB",
        "",
        "| place | s that a save blocks training | s until it is complete and verified | s of reading it |",
        "|---|---:|---:|---:|",
        *(f"| {place} | {blocked:.2f} | {complete:.2f} | {read:.2f} |" for place, blocked, complete, read in times),
        "",
        f"- Medians of {REPEATS}, without the proxy. The server, written in Python, shares two cores with the run and,",
        f"  at a load of {os.getloadavg()[1]:.0f}, with other programs. A store of many machines is not measured.",
        "",
        "`python -m benchmarks.object_storage`",
    ]
    write_results(PAGE, "\n".join(lines))


if __name__ == "__main__":
    main()
