#!/bin/sh
python3 - <<'PY'
import csv
from collections import defaultdict
from decimal import Decimal

totals = defaultdict(Decimal)
with open("/app/sales.csv", newline="") as file:
    for sale in csv.DictReader(file):
        totals[sale["region"]] += Decimal(sale["amount"] or 0)
with open("/app/totals.csv", "w", newline="") as file:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["region", "total"])
    for region, total in sorted(totals.items(), key=lambda item: -item[1]):
        writer.writerow([region, f"{total:.2f}"])
PY
