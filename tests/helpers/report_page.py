"""Content of a report's page."""

from __future__ import annotations

import json
import re


def parse_embedded_json(text: str, name: str):
    return json.loads(re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', text, re.DOTALL)[1])
