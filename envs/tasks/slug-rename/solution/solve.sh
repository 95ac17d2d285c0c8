#!/bin/sh
cat > /app/slugify <<'SH'
#!/bin/bash
[ -d "$1" ] || exit 2
cd -- "$1" || exit 2
export LC_ALL=C
shopt -s dotglob nullglob

for file in *; do
    [ -f "$file" ] && [ ! -L "$file" ] || continue
    name=$(printf '%s' "$file" | tr 'A-Z' 'a-z' | sed -E 's/[^a-z0-9.]+/-/g; s/^-+//; s/-+$//')
    wanted=$name number=2
    while [ "$wanted" != "$file" ] && { [ -e "$wanted" ] || [ -L "$wanted" ]; }; do
        stem=${name%%.*}
        wanted=$stem-$number${name#"$stem"} number=$((number + 1))
    done
    [ "$wanted" = "$file" ] || mv -- "$file" "$wanted"
done
SH
chmod +x /app/slugify
