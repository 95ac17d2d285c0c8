"""Compares report.json with the summary of environment/access.log."""

import json
from pathlib import Path

EXPECTED = {
    "requests": 219,
    "skipped": 9,
    "errors": 15,
    "bytes": 869645,
    "top_paths": [["/", 34], ["/static/app.css", 33], ["/shop/cart", 30]],
    "busiest_hour": "08",
}

found = json.loads(Path("/app/report.json").read_text())
wrong = [
    f"{key}: expected {value!r}, found {found.get(key)!r}" for key, value in EXPECTED.items() if found.get(key) != value
]
assert set(found) == set(EXPECTED), f"the keys are {sorted(found)}"
assert not wrong, "\n".join(wrong)
print("report.json is right")
