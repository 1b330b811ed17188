"""Records of this rank: a step has the sample of the GPU's sensors that was due."""

from __future__ import annotations

from pathlib import Path

from phalanx.data.loader import prefetch
from phalanx.runs.step_records import read_rank_records
from phalanx.train.callbacks.rank_records import RankRecords
from phalanx.train.profiling.gpu_sensors import GpuSensors
from tests.helpers.small_runs import make_trainer, small_run


def test_step_record_has_sample_if_one_is_due(documents: Path, tmp_path: Path) -> None:
    trainer = make_trainer(small_run(documents, tmp_path, {}))
    records = RankRecords()
    records.on_train_start(trainer)
    assert records.gpu_sensors is None  # on a CPU
    records.gpu_sensors = GpuSensors({"clock_mhz": lambda: 1755}, unsupported=OSError)
    batches = prefetch(trainer.loader, 0, 2)
    for _ in range(2):
        records.on_step_end(trainer, trainer.train_step(batches))
    records.on_train_end(trainer, {})
    ranks, _, _ = read_rank_records(trainer.directory, [])
    assert [step.get("gpu_sample") for step in ranks[0].steps] == [{"clock_mhz": 1755}, None]
