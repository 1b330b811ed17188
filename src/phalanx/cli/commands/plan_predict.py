"""`phalanx plan predict`: predictions of the rows of a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument

from phalanx.cli.common.options import Json


def predict(
    table: Annotated[Path, Argument(help="A CSV file with a run in each row.", metavar="RUNS.csv")], json_: Json = False
) -> None:
    """Predict the runs of a table, each with the trainer that its row describes.

    Each row has its own machine, ranks, layout and batch. `phalanx plan` predicts Phalanx's trainer.

    Examples:

        phalanx plan predict runs.csv

        phalanx plan predict runs.csv --json
    """
    import json
    from dataclasses import asdict

    from phalanx.plan.tables.csv_rows import read_rows
    from phalanx.plan.tables.predict import predict_rows

    predictions = predict_rows(read_rows(table))
    if json_:
        for row in predictions:
            print(json.dumps(asdict(row)))
    else:
        from phalanx.cli.views.plan import print_predictions

        print_predictions(predictions)
