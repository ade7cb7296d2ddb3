#!/usr/bin/env bash
# Builds notebooks/*.ipynb from puzzles/*.py, and the tutor's tables from the bank of wrong answers.
# With --check: changes nothing, exits 1 and names what is out of date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
exec uv run --quiet python docs/tutor.py "$@"
