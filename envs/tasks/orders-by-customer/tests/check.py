"""Compares customers.json with the customers of environment/orders.json."""

import json
from pathlib import Path

EXPECTED = [
    {
        "email": "ada@example.org",
        "name": "Ada Lovelace",
        "orders": ["A-099", "A-104", "A-108"],
        "spent_cents": 4095,
        "skus": ["INK-07", "PEN-01"],
    },
    {"email": "bob@example.net", "name": "Bob", "orders": ["A-111"], "spent_cents": 0, "skus": []},
    {
        "email": "grace@example.org",
        "name": "G. Hopper",
        "orders": ["A-101", "A-102"],
        "spent_cents": 2390,
        "skus": ["PAD-03", "PEN-01"],
    },
    {
        "email": "zoe@example.com",
        "name": "Zoë Łoś",
        "orders": ["A-110"],
        "spent_cents": 16,
        "skus": ["ABC-1", "ÄTZ-9"],
    },
]

found = json.loads(Path("/app/customers.json").read_text(encoding="utf-8"))
assert [customer["email"] for customer in found] == [customer["email"] for customer in EXPECTED], "other customers"
for customer, wanted in zip(found, EXPECTED):
    assert customer == wanted, f"expected {wanted}, found {customer}"
print("customers.json is right")
