#!/bin/sh
python3 - <<'PY'
import json
import re
from collections import Counter

LINE = re.compile(r'\S+ \S+ \S+ \[[^:]+:(\d\d):\d\d:\d\d [^\]]+\] "\S+ (\S+) [^"]*" (\d{3}) (\d+|-) "[^"]*" "([^"]*)"')

paths, hours, errors, size, skipped = Counter(), Counter(), 0, 0, 0
with open("/app/access.log") as log:
    for line in log:
        match = LINE.fullmatch(line.rstrip("\n"))
        if match is None:
            skipped += 1
            continue
        hour, path, status, length, agent = match.groups()
        if "bot" in agent.lower():
            continue
        paths[path.partition("?")[0]] += 1
        hours[hour] += 1
        errors += int(status) >= 500
        size += 0 if length == "-" else int(length)
report = {
    "requests": sum(paths.values()),
    "skipped": skipped,
    "errors": errors,
    "bytes": size,
    "top_paths": sorted(map(list, paths.items()), key=lambda item: (-item[1], item[0]))[:3],
    "busiest_hour": min(hours, key=lambda hour: (-hours[hour], hour)),
}
with open("/app/report.json", "w") as file:
    json.dump(report, file, indent=2)
PY
