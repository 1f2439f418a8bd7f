#!/usr/bin/env bash
# All tests but the long ones. Most wait for disks, databases and processes more than they compute: two files of them run at
# a time. Those marked `alone` start engines and trainers, or time what they do: one at a time.
# Arguments go to both parts. Exit code: that of the first part that failed; a part that a selection leaves empty does not
# count, unless both are.
set -uo pipefail
cd "$(dirname "$0")/.."

NOTHING_SELECTED=5
.venv/bin/python -m pytest -n 2 --dist loadfile -m "not long and not alone" "$@"
first=$?
.venv/bin/python -m pytest -m "alone and not long" "$@"
second=$?

if [ "$first" -ne 0 ] && { [ "$first" -ne "$NOTHING_SELECTED" ] || [ "$second" -eq "$NOTHING_SELECTED" ]; }; then
    exit "$first"
fi
[ "$second" -eq "$NOTHING_SELECTED" ] && exit 0
exit "$second"
