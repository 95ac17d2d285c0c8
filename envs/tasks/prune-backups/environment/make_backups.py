"""Makes the backups in the directory given: daily at last, with holes, then thinner and thinner."""

import sys
from datetime import date, timedelta
from pathlib import Path

NEWEST = date(2025, 1, 15)
AGES = [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 13, 14, 15, 16, 17, 20, 22, 23, 27, 29, 30, 33, 34, 35, 36, 40, 44, 45, 46]
AGES += [60, 61, 75, 76, 77, 100, 140, 141, 170, 200, 351, 352, 381, 382, 400]
OTHERS = ["README", "backup-2024-02-30.tar", "backup-2024-11-01.tar.gz", "backup-latest.tar", "old-backup-2024-11-02.tar"]

directory = Path(sys.argv[1])
directory.mkdir(parents=True)
for age in AGES:
    day = NEWEST - timedelta(days=age)
    (directory / f"backup-{day}.tar").write_text(f"backup of {day}\n")
for name in OTHERS:
    (directory / name).write_text("not a backup\n")
