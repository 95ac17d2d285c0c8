#!/bin/sh
python3 - <<'PY'
import json

with open("/app/orders.json", encoding="utf-8") as file:
    orders = sorted(json.load(file), key=lambda order: order["placed"])

customers = {}
for order in orders:
    email = order["customer"]["email"].lower()
    customer = customers.setdefault(email, {"email": email, "orders": [], "spent_cents": 0, "skus": set()})
    customer["name"] = order["customer"]["name"]
    customer["orders"].append(order["id"])
    if order["status"] != "cancelled":
        customer["spent_cents"] += sum(item["quantity"] * item["unit_cents"] for item in order["items"])
        customer["spent_cents"] -= order.get("discount_cents") or 0
        customer["skus"] |= {item["sku"] for item in order["items"]}
for customer in customers.values():
    customer["skus"] = sorted(customer["skus"])
with open("/app/customers.json", "w", encoding="utf-8") as file:
    json.dump([customers[email] for email in sorted(customers)], file, ensure_ascii=False, indent=2)
PY
