"""Compares what is left with what the rule keeps of environment/make_backups.py."""

from pathlib import Path

KEPT = {
    "days": ["2025-01-15", "2025-01-14", "2025-01-13", "2025-01-11", "2025-01-10", "2025-01-09"],
    "weeks": ["2025-01-08", "2025-01-05", "2024-12-29", "2024-12-19", "2024-12-13"],
    "months": ["2024-12-01", "2024-11-01", "2024-10-07", "2024-08-27", "2024-07-29", "2024-06-29", "2024-01-29", "2023-12-12"],
}
OTHERS = ["README", "backup-2024-02-30.tar", "backup-2024-11-01.tar.gz", "backup-latest.tar", "old-backup-2024-11-02.tar"]

expected = {f"backup-{day}.tar": f"backup of {day}\n" for days in KEPT.values() for day in days}
expected |= dict.fromkeys(OTHERS, "not a backup\n")
found = {path.name: path.read_text() for path in Path("/app/backups").iterdir()}
gone, left = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
assert not gone and not left, f"deleted but to be kept: {gone}; kept but to be deleted: {left}"
assert found == expected, "the content of a file was changed"
print("the right backups are left")
