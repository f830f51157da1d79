#!/bin/sh
set -eu
cat > /app/backup.sh <<'SH'
#!/bin/sh
# Copy a tree: backup.sh SOURCE TARGET
set -eu
if [ ! -d "$1" ] || [ ! -r "$1" ]; then
  echo "backup.sh: $1: not a readable directory" >&2
  exit 1
fi
mkdir -p -- "$2"
cp -R -- "$1/." "$2/"
SH
chmod 755 /app/backup.sh
