"""Questions about a small shop's database, for `text_to_sql`: made by seed, with the rows that answer "
"them."""

import random
import sqlite3
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal[1, 2, 3]
Row = list[Any]

SCHEMA = """CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT);
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT, category TEXT, price INTEGER);
CREATE TABLE orders
  (id INTEGER PRIMARY KEY, customer_id INTEGER, product_id INTEGER, quantity INTEGER, day TEXT);"""

_NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ida", "Jon", "Kim", "Leo", "Mia", "Noa"]
_CITIES = ["Bern", "Cork", "Graz", "Kiel", "Lyon", "Oslo", "Porto", "Turin"]
_GOODS = {
    "tools": ["axe", "drill", "file", "hammer", "saw"],
    "toys": ["ball", "doll", "kite", "puzzle", "yo-yo"],
    "food": ["bread", "cheese", "honey", "rice", "tea"],
    "books": ["atlas", "diary", "novel", "poems", "primer"],
}
_MONTHS = ["01", "02", "03", "04", "05", "06"]


@dataclass(frozen=True, slots=True)
class Problem:
    """`shown` and `hidden` are SQL that fills the schema; `expected` the right rows on each."""

    question: str
    query: str
    ordered: bool
    shown: str
    hidden: str
    expected: tuple[list[Row], list[Row]]


def draw(choose: random.Random, level: Level) -> Problem:
    """A question whose answer is neither empty nor the same on both databases."""
    while True:
        question, query = choose.choice(_QUESTIONS[level])
        facts = {
            "city": choose.choice(_CITIES),
            "category": choose.choice(sorted(_GOODS)),
            "price": choose.randint(5, 60),
            "quantity": choose.randint(2, 7),
            "month": choose.choice(_MONTHS),
            "least": choose.randint(2, 4),
        }
        query = query.format(**facts)
        shown, hidden = _database(choose), _database(choose)
        expected = _rows(shown, query), _rows(hidden, query)
        telling = all(rows and rows[0][0] not in (None, 0) for rows in expected)
        if telling and expected[0] != expected[1]:
            ordered = " ORDER BY " in query
            return Problem(question.format(**facts), query, ordered, shown, hidden, expected)


def _rows(setup: str, query: str) -> list[Row]:
    """Our own query on our own database: this may run here."""
    connection = sqlite3.connect(":memory:")
    try:
        connection.executescript(f"{SCHEMA}\n{setup}")
        return [list(row) for row in connection.execute(query)]
    finally:
        connection.close()


def _database(choose: random.Random) -> str:
    goods = [(name, kind) for kind, names in sorted(_GOODS.items()) for name in names]
    customers = [(name, choose.choice(_CITIES)) for name in choose.sample(_NAMES, 10)]
    products = [(*good, choose.randint(1, 80)) for good in choose.sample(goods, 10)]
    orders = [
        (
            choose.randint(1, len(customers)),
            choose.randint(1, len(products)),
            choose.randint(1, 9),
            f"2024-{choose.choice(_MONTHS)}-{choose.randint(1, 28):02}",
        )
        for _ in range(30)
    ]
    return "\n".join(
        f"INSERT INTO {table} VALUES ({number}, {', '.join(map(_literal, row))});"
        for table, rows in (("customers", customers), ("products", products), ("orders", orders))
        for number, row in enumerate(rows, 1)
    )


def _literal(value: str | int) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)


# level -> question, query
_QUESTIONS: dict[int, tuple[tuple[str, str], ...]] = {
    1: (
        ("How many customers live in {city}?", "SELECT count(*) FROM customers WHERE city = '{city}'"),
        (
            "What are the names of the customers in {city}?",
            "SELECT name FROM customers WHERE city = '{city}'",
        ),
        (
            "What are the names of the products that cost more than {price}?",
            "SELECT name FROM products WHERE price > {price}",
        ),
        (
            "What are name and price of each product of the category {category}?",
            "SELECT name, price FROM products WHERE category = '{category}'",
        ),
        (
            "How many orders have a quantity of at least {quantity}?",
            "SELECT count(*) FROM orders WHERE quantity >= {quantity}",
        ),
        (
            "What is the total quantity of all orders in month {month} of 2024?",
            "SELECT sum(quantity) FROM orders WHERE day LIKE '2024-{month}-%'",
        ),
        (
            "What is the highest price of a product of the category {category}?",
            "SELECT max(price) FROM products WHERE category = '{category}'",
        ),
    ),
    2: (
        (
            "How many orders with a quantity of at least {quantity} were there in each month of 2024 that "
            "has any? Give the month (like 2024-05) and the number, earliest month first.",
            "SELECT substr(day, 1, 7), count(*) FROM orders WHERE quantity >= {quantity} GROUP BY 1 ORDER "
            "BY 1",
        ),
        (
            "What are the names of the customers in {city} who ordered at least {quantity} pieces at once? "
            "Name each once.",
            "SELECT DISTINCT c.name FROM customers c JOIN orders o ON o.customer_id = c.id WHERE c.city = "
            "'{city}' AND o.quantity >= {quantity}",
        ),
        (
            "What did all orders of products of the category {category} in month {month} of 2024 cost "
            "together (price times quantity)?",
            "SELECT sum(p.price * o.quantity) FROM orders o JOIN products p ON p.id = o.product_id WHERE "
            "p.category = '{category}' AND o.day LIKE '2024-{month}-%'",
        ),
        (
            "How many pieces of each product that costs at most {price} were ordered? Give the product's "
            "name and the number, without products that nobody ordered.",
            "SELECT p.name, sum(o.quantity) FROM orders o JOIN products p ON p.id = o.product_id WHERE "
            "p.price <= {price} GROUP BY p.id",
        ),
        (
            "What are the names of the products that cost at least {price} and were never ordered?",
            "SELECT name FROM products WHERE price >= {price} AND id NOT IN (SELECT product_id FROM orders)",
        ),
    ),
    3: (
        (
            "Which customers gave at least {least} orders with a quantity of at least {quantity} each? "
            "Give the "
            "name and the number of those orders, sorted by name.",
            "SELECT c.name, count(*) FROM customers c JOIN orders o ON o.customer_id = c.id "
            "WHERE o.quantity >= {quantity} GROUP BY c.id HAVING count(*) >= {least} ORDER BY c.name",
        ),
        (
            "What did the orders of the customers of each city cost together (price times quantity), "
            "counting "
            "only products that cost at least {price}? Give city and cost, the costliest first; equal ones "
            "by "
            "city.",
            "SELECT c.city, sum(p.price * o.quantity) AS cost FROM orders o JOIN customers c "
            "ON c.id = o.customer_id JOIN products p ON p.id = o.product_id WHERE p.price >= {price} "
            "GROUP BY c.city ORDER BY cost DESC, c.city",
        ),
        (
            "Which customers ordered products of at least {least} categories, counting only orders with a "
            "quantity above {quantity} or products cheaper than {price}? Give their names, sorted.",
            "SELECT c.name FROM customers c JOIN orders o ON o.customer_id = c.id JOIN products p "
            "ON p.id = o.product_id WHERE o.quantity > {quantity} OR p.price < {price} GROUP BY c.id "
            "HAVING count(DISTINCT p.category) >= {least} ORDER BY c.name",
        ),
        (
            "For each category, which product cheaper than {price} had the most pieces ordered? Give "
            "category, "
            "product name and pieces, sorted by category; of products with equally many, give all, sorted by "
            "name.",
            "WITH s AS (SELECT p.category, p.name, sum(o.quantity) AS n FROM products p JOIN orders o "
            "ON o.product_id = p.id WHERE p.price < {price} GROUP BY p.id) SELECT category, name, n FROM s "
            "WHERE n = (SELECT max(n) FROM s AS t WHERE t.category = s.category) ORDER BY category, name",
        ),
    ),
}
