#!/usr/bin/env bash
# Builds notebooks/*.ipynb from puzzles/*.py, and the tutor's tables from the bank of wrong answers.
# With --check: changes nothing, exits 1 and names what is out of date.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
status=0
uv run --quiet python -m pallas_puzzles.app.notebooks "$@" || status=$?
if [ "$status" -le 1 ] && [ "${1:-}" != "--help" ]; then
    uv run --quiet python docs/tutor.py "$@" || status=$?
fi
exit "$status"
