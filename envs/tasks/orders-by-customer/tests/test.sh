#!/bin/sh
# Writes 1 or 0 to the reward file, whatever happens in the check.
if python3 -I /tests/check.py; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
