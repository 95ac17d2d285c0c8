#!/bin/sh
cd /app/site || exit 1
find . -path ./private -prune -o -type d -exec chmod 755 {} +
find . -path ./private -prune -o -type f -print | while IFS= read -r file; do
    if [ "$(head -c 2 "$file")" = '#!' ]; then chmod 755 "$file"; else chmod 644 "$file"; fi
done
find ./private -type d -exec chmod 700 {} +
find ./private -type f -exec chmod 600 {} +
