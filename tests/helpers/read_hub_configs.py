"""Print the width of each model that the arguments name, or the error, as a JSON list."""

import json
import sys

from phalanx.spec.errors import UserError
from phalanx.spec.files.load import resolve_model


def read_width(name: str) -> int | str:
    try:
        return resolve_model({"from_hf": name})["hidden_size"]
    except UserError as error:
        return str(error)


if __name__ == "__main__":
    print(json.dumps([read_width(name) for name in sys.argv[1:]]))
