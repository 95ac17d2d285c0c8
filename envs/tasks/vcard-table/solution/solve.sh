#!/bin/sh
python3 - <<'PY'
import re

ESCAPES = {"n": " ", "N": " "}

with open("/app/contacts.vcf", encoding="utf-8") as file:
    text = file.read().replace("\r\n", "\n").replace("\n ", "")

rows = [["name", "emails", "phone", "birthday"]]
for line in text.splitlines():
    head, _, value = line.partition(":")
    name, *parameters = head.upper().split(";")
    value = re.sub(r"\\(.)", lambda match: ESCAPES.get(match[1], match[1]), value)
    if name == "BEGIN":
        card = {"EMAIL": [], "TEL": [], "CELL": []}
    elif name in ("EMAIL", "TEL"):
        types = [kind for part in parameters if part.startswith("TYPE=") for kind in part[5:].split(",")]
        card["CELL" if name == "TEL" and "CELL" in types else name].append(value)
    elif name == "END":
        digits = card.get("BDAY", "").replace("-", "")
        birthday = "-".join([digits[:4], digits[4:6], digits[6:]]) if digits else ""
        phone = (card["CELL"] + card["TEL"] + [""])[0]
        rows.append([card.get("FN", ""), ", ".join(card["EMAIL"]), phone, birthday])
    else:
        card[name] = value
with open("/app/contacts.tsv", "w", encoding="utf-8") as file:
    file.writelines("\t".join(row) + "\n" for row in rows)
PY
