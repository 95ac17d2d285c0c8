#!/bin/bash
cd /app/downloads || exit 1
LC_ALL=C
shopt -s dotglob

declare -A seen
for file in *; do
    sum=$(sha256sum < "$file")
    if [ -n "${seen[$sum]}" ]; then rm -- "$file"; else seen[$sum]=1; fi
done

mkdir images documents archives other
for file in *; do
    [ -f "$file" ] || continue
    case "${file,,}" in
        *.png | *.jpg | *.jpeg | *.gif) folder=images ;;
        *.pdf | *.txt | *.md) folder=documents ;;
        *.zip | *.tar | *.gz) folder=archives ;;
        *) folder=other ;;
    esac
    mv -- "$file" "$folder/"
done
