#!/bin/sh
python3 - <<'PY'
import csv
import sqlite3

QUERY = """
SELECT name, stock, minimum FROM (
    SELECT name, minimum, active,
           (SELECT coalesce(sum(quantity), 0) FROM delivery WHERE product_id = product.id)
         - (SELECT coalesce(sum(quantity), 0) FROM sale WHERE product_id = product.id) AS stock
    FROM product
)
WHERE active AND stock < minimum
ORDER BY minimum - stock DESC, name
"""

with open("/app/restock.csv", "w", newline="") as file:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["product", "stock", "minimum"])
    writer.writerows(sqlite3.connect("/app/shop.db").execute(QUERY))
PY
