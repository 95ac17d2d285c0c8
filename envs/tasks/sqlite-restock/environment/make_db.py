"""Makes the shop's database at the path given."""

import sqlite3
import sys

PRODUCTS = [  # id, name, minimum, active
    (1, "Anchor", 5, 1),
    (2, "Buoy", 12, 1),
    (3, "Compass", 3, 1),
    (4, "Dinghy", 2, 0),
    (5, "Ensign", 10, 1),
    (6, "Fender", 20, 1),
    (7, "Gaff", 4, 1),
    (8, "Hatch", 1, 1),
]
DELIVERIES = [(1, 10), (1, 4), (2, 30), (3, 3), (4, 1), (5, 6), (6, 40), (6, 10), (2, 5), (8, 2)]
SALES = [(1, 3), (1, 7), (2, 11), (2, 9), (2, 4), (3, 1), (5, 2), (5, 1), (6, 25), (6, 14), (6, 1), (7, 1), (4, 1)]

database = sqlite3.connect(sys.argv[1])
with database:
    database.execute(
        "CREATE TABLE product (id INTEGER PRIMARY KEY, name TEXT NOT NULL, minimum INTEGER NOT NULL, active INTEGER NOT NULL)"
    )
    for table in ("delivery", "sale"):
        database.execute(
            f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, product_id INTEGER REFERENCES product, quantity INTEGER)"
        )
    database.executemany("INSERT INTO product VALUES (?, ?, ?, ?)", PRODUCTS)
    database.executemany("INSERT INTO delivery (product_id, quantity) VALUES (?, ?)", DELIVERIES)
    database.executemany("INSERT INTO sale (product_id, quantity) VALUES (?, ?)", SALES)
database.close()
