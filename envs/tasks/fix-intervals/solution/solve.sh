#!/bin/sh
cd /app || exit 1
sed -i \
  -e 's/if merged and start < merged\[-1\]\[1\]:/if merged and start <= merged[-1][1]:/' \
  -e 's/merged\[-1\]\[1\] = end/merged[-1][1] = max(merged[-1][1], end)/' \
  -e 's/for start, end in intervals)/for start, end in merge(intervals))/' \
  -e 's/        if busy_start > start:/        if busy_start >= end:\n            break\n        if busy_start > start:/' \
  intervals.py
