#!/bin/sh
# Print the path of a Python that can make the virtual environment: PYTHON if set, else the first fit on the path.
# The tests run on 3.11, which comes first; for 3.12 and 3.13 the pinned packages have wheels too.
set -eu
check='import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    path=$(command -v "$candidate" 2>/dev/null) || continue
    if "$path" -c "$check" >/dev/null 2>&1; then
        "$path" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
            echo "note: $path is not Python 3.11, on which this is tested; name one with PYTHON=" >&2
        echo "$path"
        exit 0
    fi
done
echo "No Python 3.11, 3.12 or 3.13 with the venv module was found among: ${PYTHON:-python3.11 python3.12 python3.13 python3}." >&2
echo "Install one (Debian and Ubuntu: python3.11 and python3.11-venv), or name one: make demo PYTHON=/path/to/python3.11" >&2
exit 1
