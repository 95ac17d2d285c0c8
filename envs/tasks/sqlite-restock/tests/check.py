"""Compares restock.csv with the stock of environment/make_db.py, and the database with what it held."""

import sqlite3
from pathlib import Path

EXPECTED = """\
product,stock,minimum
Fender,10,20
Ensign,3,10
Gaff,-1,4
Anchor,4,5
Buoy,11,12
Compass,2,3
"""

found = Path("/app/restock.csv").read_text().replace("\r\n", "\n")
assert found.strip() == EXPECTED.strip(), f"restock.csv holds:\n{found}"
database = sqlite3.connect("file:/app/shop.db?mode=ro", uri=True)
totals = [database.execute(f"SELECT count(*), sum(quantity) FROM {table}").fetchone() for table in ("delivery", "sale")]
assert totals == [(10, 111), (13, 80)], f"the database was changed: {totals}"
print("restock.csv is right")
