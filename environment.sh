# Sourced by run_verification_main.sh and run_tests.sh with the names of requirements files; sets PYTHON and ROOT, both absolute.
# An environment that already satisfies the files is used as it is. Otherwise .venv is made or updated, and Lockstep installed in it,
# editable. Where Lockstep is not installed, PYTHONPATH names it.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
case ${PYTHON:-} in
  */*) case $PYTHON in /*) ;; *) PYTHON=$PWD/$PYTHON ;; esac ;;
esac

_satisfied() { # PYTHON FILE...: does this interpreter have every pinned version of the files?
  "$1" - "${@:2}" 2>/dev/null <<'PY'
import importlib.metadata, pathlib, re, sys

lines = [line for path in sys.argv[1:] for line in pathlib.Path(path).read_text().splitlines()]
for name, version in re.findall(r"^([\w-]+)(?:\[.*\])?==(\S+)", "\n".join(lines), re.MULTILINE):
    if importlib.metadata.version(name).split("+")[0] != version:  # torch 2.13.0+cpu is 2.13.0
        sys.exit(1)
PY
}

_installed() { # PYTHON: is this very Lockstep what it imports, from any folder?
  "$1" -P -c 'import importlib.util, sys
found = importlib.util.find_spec("lockstep")
sys.exit(not (found and found.origin == sys.argv[1]))' "$ROOT/lockstep/__init__.py"
}

_newest_python() { # a Python of 3.11 or later, by trying
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
}

_shown() { # pip's lines: one that moves on a terminal; elsewhere what takes time; errors in any case
  local line
  while IFS= read -r line; do
    case $line in
      *ERROR* | *error:*) printf '%s\n' "$line" >&2 ;;
      *) if [ -t 1 ]; then printf '\r\033[K%.*s' "$((${COLUMNS:-80} - 1))" "$line"; else case $line in *Downloading* | Installing*) printf '%.200s\n' "$line" ;; esac; fi ;;
    esac
  done
  [ ! -t 1 ] || printf '\r\033[K'
}

_set_up() { # FILE...
  local base file wanted=()
  base=$(_newest_python)
  if [ -z "$base" ]; then
    echo "$0: no Python 3.11 or later on the PATH; install one, or set PYTHON to it" >&2
    exit 2
  fi
  if _satisfied "$base" "$@"; then
    PYTHON=$(command -v "$base")
    return
  fi
  PYTHON=$ROOT/.venv/bin/python
  if ! _satisfied "$PYTHON" "$@"; then
    if ! { mkdir -p "$ROOT/.venv" && touch "$ROOT/.venv/.writable" && rm "$ROOT/.venv/.writable"; } 2>/dev/null; then
      echo "$0: no Python found with the packages of ${*#"$ROOT/"}, and $ROOT/.venv is not writable; set PYTHON to one that has them" >&2
      exit 2
    fi
    local begin=$SECONDS
    echo "Installing ${*#"$ROOT/"} into $ROOT/.venv, once; it takes a few minutes"
    if ! "$PYTHON" -m pip --version >/dev/null 2>&1 && ! "$base" -m venv --clear "$ROOT/.venv"; then
      echo "$0: $base cannot make a virtual environment; install its venv module (Debian: python3-venv)" >&2
      exit 2
    fi
    for file; do wanted+=(-r "$file"); done
    if ! "$PYTHON" -m pip install --disable-pip-version-check --progress-bar off "${wanted[@]}" 2>&1 | _shown ||
      ! "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --editable "$ROOT"; then
      echo "$0: installing ${*#"$ROOT/"} failed (see above); check the network and the free disk space, then run this again" >&2
      exit 2
    fi
    echo "Installed in $((SECONDS - begin)) s"
  fi
}

_set_up "${@/#/$ROOT/}"
if ! _installed "$PYTHON"; then
  export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
fi
