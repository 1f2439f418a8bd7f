#!/usr/bin/env bash
# All tests but the long ones. Those of unit/ and contract/ wait for disks and databases more than they compute: two files of
# them run at a time. Those of fault/ and integration/ start engines and trainers, kill them and time them: one at a time.
# Arguments go to both parts. Exit code: that of the first part that failed; a part that a selection leaves empty does not
# count, unless both are.
set -uo pipefail
cd "$(dirname "$0")/.."

NOTHING_SELECTED=5
.venv/bin/python -m pytest -n 2 --dist loadfile "$@" tests/unit tests/contract
first=$?
.venv/bin/python -m pytest "$@" tests/fault tests/integration
second=$?

if [ "$first" -ne 0 ] && { [ "$first" -ne "$NOTHING_SELECTED" ] || [ "$second" -eq "$NOTHING_SELECTED" ]; }; then
    exit "$first"
fi
[ "$second" -eq "$NOTHING_SELECTED" ] && exit 0
exit "$second"
