#!/bin/sh
set -eu
cd /app/inbox
find . -type f -name 'IMG_[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]_*.jpg' | sed 's|^./||' | LC_ALL=C sort | while read -r path; do
  name=$(basename "$path" .jpg)
  date=${name#IMG_}
  folder=/app/sorted/$(printf %s "$date" | cut -c1-4)/$(printf %s "$date" | cut -c5-6)
  mkdir -p "$folder"
  target=$folder/$name.jpg
  [ -e "$target" ] && target=$folder/$name-1.jpg
  cp "$path" "$target"
done
