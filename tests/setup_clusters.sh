#!/usr/bin/env bash
# Installs what `make test-clusters` needs, as far as it can be had here: Ray and submitit from the pinned
# versions; Slurm and munge where apt-get and root are. Never fails: one line for each thing that it skips.
set -uo pipefail
cd "$(dirname "$0")/.."
PY=${PY:-.venv/bin/python}
CONSTRAINTS=${CONSTRAINTS-constraints.txt}
LIMIT_SECONDS=${LIMIT_SECONDS:-90} # for each attempt

# attempt WHAT COMMAND...: run it for at most LIMIT_SECONDS, or say why WHAT is skipped.
attempt() {
    local what=$1 output code=0
    shift
    output=$(timeout --kill-after=5 "$LIMIT_SECONDS" "$@" 2>&1 </dev/null) || code=$?
    case $code in
    0) return 0 ;;
    124 | 137) output="it took longer than $LIMIT_SECONDS s" ;;
    esac
    echo "skipped: $what because $(tail -n 1 <<<"${output:-$1 ended with $code}" | cut -c -200)"
    return 1
}

has() { "$PY" -c 'import importlib.util, sys; sys.exit(any(map(lambda name: importlib.util.find_spec(name) is None, sys.argv[1:])))' "$@"; }

if ! has ray submitit; then
    pinned=()
    [ -z "$CONSTRAINTS" ] || pinned=(-c "$CONSTRAINTS")
    # Not as an extra of this package: that would install the package itself again, under tests that may run now.
    mapfile -t wanted < <("$PY" -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; print(*extras["slurm"], *extras["ray"], sep="\n")')
    attempt "Ray and submitit" "$PY" -m pip install --quiet --disable-pip-version-check "${wanted[@]}" "${pinned[@]}"
fi

missing=()
for name in slurmctld slurmd munged sbatch squeue scancel scontrol srun sinfo; do
    command -v "$name" >/dev/null || missing+=("$name")
done
if [ ${#missing[@]} -gt 0 ]; then
    export DEBIAN_FRONTEND=noninteractive
    if [ "$(id -u)" != 0 ]; then
        echo "skipped: Slurm because only root may install it (apt-get install slurm-wlm munge)"
    elif ! command -v apt-get >/dev/null; then
        echo "skipped: Slurm because there is no apt-get here; missing: ${missing[*]}"
    else
        attempt "the list of Debian's packages" apt-get -q update
        attempt "Slurm" apt-get -q -y -o DPkg::Lock::Timeout=20 install --no-install-recommends slurm-wlm munge
    fi
elif [ "$(id -u)" != 0 ]; then
    echo "skipped: tests on Slurm because the Slurm of the tests needs root"
fi
exit 0
