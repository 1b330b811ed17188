"""`phalanx plan --batch`: predictions of the rows of a table."""

from __future__ import annotations

from pathlib import Path


def predict_file(file: Path, as_json: bool) -> None:
    """Print the prediction of each row of a CSV file."""
    import json
    from dataclasses import asdict

    from phalanx.plan.tables.csv_rows import read_rows
    from phalanx.plan.tables.predict import predict_rows

    predictions = predict_rows(read_rows(file))
    if as_json:
        for row in predictions:
            print(json.dumps(asdict(row)))
    else:
        from phalanx.cli.views.plan import print_predictions

        print_predictions(predictions)
