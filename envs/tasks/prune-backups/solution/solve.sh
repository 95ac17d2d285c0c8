#!/bin/sh
python3 - <<'PY'
import re
from datetime import date
from pathlib import Path

backups = {}
for path in Path("/app/backups").iterdir():
    match = re.fullmatch(r"backup-(\d{4})-(\d\d)-(\d\d)\.tar", path.name)
    if match:
        try:
            backups[date(*map(int, match.groups()))] = path
        except ValueError:
            pass

newest = max(backups)
kept, weeks, months = set(), {}, {}
for day in sorted(backups):
    age = (newest - day).days
    if age <= 6:
        kept.add(day)
    elif age <= 34:
        weeks[day.isocalendar()[:2]] = day
    else:
        months.setdefault((day.year, day.month), day)
kept |= set(weeks.values()) | set(months.values())
for day, path in backups.items():
    if day not in kept:
        path.unlink()
PY
