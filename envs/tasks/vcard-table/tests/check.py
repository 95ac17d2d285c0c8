"""The table of environment/contacts.vcf, compared line by line."""

from pathlib import Path

EXPECTED = [
    ["name", "emails", "phone", "birthday"],
    ["Prof. Lise Meitner", "lise@example.org", "+46 8 555 0102", "1878-11-07"],
    ["Marie Skłodowska Curie", "marie@example.com, m.curie@example.net", "", "1867-11-07"],
    ["Ohm, Weber ; Partners Laboratory \\ Workshop", "", "555-0199", ""],
    ["Nobody", "", "555-0000", ""],
]

lines = Path("/app/contacts.tsv").read_text(encoding="utf-8").replace("\r\n", "\n").strip("\n").split("\n")
found = [line.split("\t") for line in lines]
assert len(found) == len(EXPECTED), f"{len(found)} lines instead of {len(EXPECTED)}"
for line, wanted in zip(found, EXPECTED):
    assert line == wanted, f"expected {wanted}, found {line}"
print("contacts.tsv is right")
