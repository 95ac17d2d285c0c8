"""The totals of environment/sales.csv, compared line by line."""

from pathlib import Path

EXPECTED = """\
region,total
Central,1000.05
East,459.00
North,445.50
South,385.00
West,0.00
"""

found = Path("/app/totals.csv").read_text().replace("\r\n", "\n")
assert found.strip() == EXPECTED.strip(), f"totals.csv holds:\n{found}"
print("totals.csv is right")
