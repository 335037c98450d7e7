#!/usr/bin/env bash
# One TPU VM or a whole pod slice: create it, set it up, train, look, delete.
#
#   launch/tpu_vm.sh create --name=g --zone=us-west4-a --type=v5litepod-16 --spot
#   launch/tpu_vm.sh setup  --name=g --zone=us-west4-a --bucket=my-runs
#   launch/tpu_vm.sh run    --name=g --zone=us-west4-a -- \
#       --config=configs/alfworld.py:7b --workdir=runs/alfworld-7b
#   launch/tpu_vm.sh logs   --name=g --zone=us-west4-a
#   launch/tpu_vm.sh resume ... as run: the same command goes on where it stopped
#   launch/tpu_vm.sh keep   ... all options of create, setup and run: does all of
#       it, and does it again whenever spot capacity is taken away
#   launch/tpu_vm.sh delete --name=g --zone=us-west4-a
#
# --dry-run prints the commands, and runs none.

set -euo pipefail

readonly folder='gigpo_jax'
readonly mount='runs'  # of the bucket, in that folder
readonly log='train.log'

name='' zone='' type='' version='' project='' bucket='' repository='' extra='tpu'
spot='' dry_run='' seconds=60
train=()

die() {
  printf '%s\n' "$1" >&2
  exit 2
}

usage() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

parse() {
  while (($#)); do
    case "$1" in
      --name=*) name="${1#*=}" ;;
      --zone=*) zone="${1#*=}" ;;
      --type=*) type="${1#*=}" ;;
      --version=*) version="${1#*=}" ;;
      --project=*) project="${1#*=}" ;;
      --bucket=*) bucket="${1#*=}" ;;
      --repository=*) repository="${1#*=}" ;;
      --extra=*) extra="${1#*=}" ;;
      --every=*) seconds="${1#*=}" ;;
      --spot) spot=yes ;;
      --dry-run) dry_run=yes ;;
      --)
        shift
        train=("$@")
        return
        ;;
      *) die "$1: unknown; see launch/tpu_vm.sh help" ;;
    esac
    shift
  done
}

need() {
  local option
  for option in "$@"; do
    [[ -n "${!option}" ]] || die "--$option=: missing; see launch/tpu_vm.sh help"
  done
}

# The software of a VM, by its kind of TPU.
default_version() {
  case "$type" in
    v5litepod-*) printf 'v2-alpha-tpuv5-lite' ;;
    v5p-*) printf 'v2-alpha-tpuv5' ;;
    v6e-*) printf 'v2-alpha-tpuv6e' ;;
    *) die "--type=$type: unknown; must be v5litepod-N, v5p-N or v6e-N" ;;
  esac
}

run() {
  if [[ -n "$dry_run" ]]; then
    printf '%q ' "$@"
    printf '\n'
  else
    "$@"
  fi
}

tpu() {
  local verb="$1"
  shift
  run gcloud compute tpus tpu-vm "$verb" "$name" --zone="$zone" \
    ${project:+--project="$project"} "$@"
}

on_all() {
  tpu ssh --worker=all --command="$1"
}

create() {
  need name zone type
  version="${version:-$(default_version)}"
  tpu create --accelerator-type="$type" --version="$version" ${spot:+--spot}
}

setup() {
  need name zone
  local source="${repository:-}"
  if [[ -z "$source" ]]; then
    source="$(git -C "$(dirname "$0")/.." remote get-url origin 2>/dev/null)" ||
      die '--repository=: missing, and this folder has no origin; give its URL'
  fi
  local script
  script="set -e; test -d $folder || git clone $(printf '%q' "$source") $folder"
  script+="; cd $folder; git pull --ff-only; python3 -m venv .venv"
  script+="; .venv/bin/pip install -q -e '.[$extra]'"
  if [[ -n "$bucket" ]]; then
    # All hosts write one folder, which outlives them.
    script+="; mkdir -p $mount; mountpoint -q $mount ||"
    script+=" gcsfuse --implicit-dirs $(printf '%q' "$bucket") $mount"
  fi
  on_all "$script"
}

start() {
  need name zone
  ((${#train[@]})) || die '--: missing; after it come the flags of launch/train.py'
  local flags
  flags="$(printf '%q ' "${train[@]}")"
  on_all "cd $folder; nohup .venv/bin/python launch/train.py ${flags% } \
>> $log 2>&1 < /dev/null & echo started"
}

logs() {
  need name zone
  tpu ssh --worker=0 --command="tail -n 100 -f $folder/$log"
}

delete() {
  need name zone
  tpu delete --quiet
}

state() {
  gcloud compute tpus tpu-vm describe "$name" --zone="$zone" \
    ${project:+--project="$project"} --format='value(state)' 2>/dev/null ||
    printf 'ABSENT'
}

# Ready and training; otherwise made anew. The run goes on from its checkpoint.
keep() {
  need name zone type bucket
  ((${#train[@]})) || die '--: missing; after it come the flags of launch/train.py'
  if [[ -n "$dry_run" ]]; then
    create
    setup
    start
    return
  fi
  while true; do
    case "$(state)" in
      READY) ;;
      CREATING | STARTING | REPAIRING | RESTARTING) ;;
      ABSENT) create && setup && start || printf 'no capacity; again soon\n' ;;
      *) delete || true ;;
    esac
    sleep "$seconds"
  done
}

main() {
  (($#)) || {
    usage
    exit 2
  }
  local command="$1"
  shift
  parse "$@"
  case "$command" in
    create) create ;;
    setup) setup ;;
    run | resume) start ;;
    logs) logs ;;
    delete) delete ;;
    keep) keep ;;
    help | --help | -h) usage ;;
    *) die "$command: unknown; one of create, setup, run, logs, resume, keep, delete" ;;
  esac
}

main "$@"
