#!/usr/bin/env bash
# One TPU VM or a pod slice: create it, set it up, train, show the log, delete.
#
#   launch/tpu_vm.sh create --name=g --zone=us-west4-a --type=v5litepod-16 --spot
#   launch/tpu_vm.sh setup  --name=g --zone=us-west4-a --bucket=my-runs \
#       --then='alfworld-download --data-dir data'
#   launch/tpu_vm.sh run    --name=g --zone=us-west4-a -- \
#       --config=configs/alfworld.py:7b --workdir=runs/alfworld-7b \
#       --config.env.data_dir=data --config.model.path=Qwen/Qwen2.5-7B-Instruct
#   launch/tpu_vm.sh logs   --name=g --zone=us-west4-a
#   launch/tpu_vm.sh resume ... same as run: training resumes where it stopped
#   launch/tpu_vm.sh keep   ... all options of create, setup and run: runs these
#       commands, and repeats them whenever the slice is preempted or training
#       stops before it is finished; ends after five starts without training of
#       ten minutes, or 30 looks without an answer of all hosts
#   launch/tpu_vm.sh delete --name=g --zone=us-west4-a
#
# Further options: --project=P, --version=V of the VM's software, --repository=URL,
# --extra=alfworld,tpu,wandb for pip, --worker=N, the host whose log is shown,
# --every=60 seconds between two looks of keep, and --dry-run, which prints the
# commands without running them.

set -euo pipefail

readonly folder='gigpo_jax'
readonly mount='runs'  # mount point of the bucket, in that folder
readonly log='train.log'

name='' zone='' type='' version='' project='' bucket='' repository='' then=''
extra='alfworld,tpu' spot='' dry_run='' seconds=60 commit='' worker=0
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
      --then=*) then="${1#*=}" ;;
      --every=*) seconds="${1#*=}" ;;
      --worker=*) worker="${1#*=}" ;;
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

# Software version of the VM for the type of TPU.
choose_version() {
  need type
  case "$type" in
    v5litepod-*) version="${version:-v2-alpha-tpuv5-lite}" ;;
    v5p-*) version="${version:-v2-alpha-tpuv5}" ;;
    v6e-*) version="${version:-v2-alpha-tpuv6e}" ;;
    *) die "--type=$type: unknown; must be v5litepod-N, v5p-N or v6e-N" ;;
  esac
}

choose_repository() {
  [[ -n "$repository" ]] ||
    repository="$(git -C "$(dirname "$0")/.." remote get-url origin 2>/dev/null)" ||
    die '--repository=: missing, and this folder has no origin; give its URL'
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
  choose_version
  tpu create --accelerator-type="$type" --version="$version" ${spot:+--spot}
}

setup() {
  need name zone
  choose_repository
  local script
  script="set -e; test -d $folder || git clone $(printf '%q' "$repository") $folder"
  script+="; cd $folder"
  # A kept run does not change its code when it is set up again.
  script+="; git fetch -q origin; git checkout -q ${commit:-origin/HEAD}"
  # The VM's own Python is too old for jax.
  script+="; export PATH=\"\$HOME/.local/bin:\$PATH\""
  script+='; command -v uv > /dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh'
  script+='; test -d .venv || uv venv -q --python 3.12 .venv; . .venv/bin/activate'
  script+="; uv pip install -q -e '.[$extra]'"
  if [[ -n "$bucket" ]]; then
    # All hosts write to one folder, which outlives them. A checkpoint is
    # finished by renaming its folder.
    script+="; mkdir -p $mount; mountpoint -q $mount || gcsfuse --implicit-dirs"
    script+=" --rename-dir-limit=1000000 $(printf '%q' "$bucket") $mount"
  fi
  script+="${then:+; $then}"
  on_all "$script"
}

# The first line of the log of a start with these flags, quoted for a shell.
first_line() {
  printf '%q' "flags: $(printf '%q ' "${train[@]}")"
}

start() {
  need name zone
  ((${#train[@]})) || die '--: missing; after it come the flags of launch/train.py'
  local flags script
  flags="$(printf '%q ' "${train[@]}")"
  # The log of the last start; $log.old has those before.
  script="cd $folder || exit; touch $log; cat $log >> $log.old; echo $(first_line) > $log"
  # Compiled programs outlive the slice, too.
  script+="; mountpoint -q $mount && export JAX_COMPILATION_CACHE_DIR=\$PWD/$mount/.programs"
  script+="; { nohup .venv/bin/python launch/train.py ${flags% } >> $log 2>&1 < /dev/null & }"
  on_all "$script; echo started"
}

# Prints what the hosts do: training (all of them), partial (only some of them),
# finished, idle, or unknown if not every host answers.
activity() {
  local hosts
  hosts="$(on_all "cd $folder && { pgrep -f '[l]aunch/train.py' > /dev/null \
&& echo activity=training || { head -n 1 $log | grep -qxF -- $(first_line) \
&& tail -n 5 $log | grep -q '^learning curve: ' && echo activity=finished; }; } \
|| echo activity=idle" 2>/dev/null)" || {
    printf 'unknown'
    return
  }
  case "$hosts" in
    *activity=training*)
      # Only the main process prints that the run is finished.
      case "$hosts" in
        *activity=finished* | *activity=idle*) printf 'partial' ;;
        *) printf 'training' ;;
      esac
      ;;
    *activity=finished*) printf 'finished' ;;
    *activity=idle*) printf 'idle' ;;
    *) printf 'unknown' ;;
  esac
}

# Ends training on all hosts: a process whose peers are lost may wait forever.
end_training() {
  on_all "pkill -f '[l]aunch/train.py'; for n in \$(seq 30); do \
pgrep -f '[l]aunch/train.py' > /dev/null || break; sleep 1; done; \
pkill -KILL -f '[l]aunch/train.py'; true"
}

logs() {
  need name zone
  tpu ssh --worker="$worker" --command="tail -n 100 -f $folder/$log"
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

# Refuses what keep could not repeat.
check_kept() {
  [[ "$seconds" =~ ^[0-9]+(\.[0-9]+)?$ ]] ||
    die "--every=$seconds: no number; must be seconds, such as 60"
  local flag
  for flag in "${train[@]}"; do
    case "$flag" in
      --workdir="$mount"/* | -workdir="$mount"/*) ;;
      --workdir | -workdir | --workdir=* | -workdir=*)
        die "$flag: would be lost with the slice; write --workdir=$mount/NAME, which is in the bucket"
        ;;
    esac
  done
}

# Ends keep; the slice stays.
give_up() {
  printf '%s; to end the costs, run launch/tpu_vm.sh delete\n' "$1"
  return 1
}

# Trains until the run is finished. It resumes from its checkpoint. The code is
# that of the moment when this command starts.
keep() {
  need name zone type bucket
  ((${#train[@]})) || die '--: missing; after it come the flags of launch/train.py'
  choose_version
  choose_repository
  check_kept
  if [[ -n "$dry_run" ]]; then
    create
    setup
    start
    return
  fi
  commit="$(git ls-remote "$repository" HEAD 2> /dev/null | cut -f 1)" || true
  # Starts since training lasted for ten minutes; looks without an answer.
  local now before='' starts=0 unanswered=0 since=$SECONDS
  while true; do
    now=''
    case "$(state)" in
      READY)
        now="$(activity)"
        case "$now" in
          unknown)
            unanswered=$((unanswered + 1))
            printf 'not all hosts answer; waiting\n'
            ((unanswered < 30)) || give_up 'no answer for 30 looks' || return
            ;;
          finished)
            printf 'finished; to end the costs, run launch/tpu_vm.sh delete\n'
            return
            ;;
          idle)
            ((SECONDS - since < 600)) || starts=0
            if ((starts == 5)); then
              printf 'no start led to ten minutes of training; the logs end with\n'
              on_all "hostname; tail -n 20 $folder/$log" || true
              give_up 'five starts failed' || return
            fi
            (setup && start) || printf 'setup failed; trying again soon\n'
            starts=$((starts + 1)) since=$SECONDS
            ;;
          partial)
            # Hosts do not start and finish in the same second.
            if [[ "$before" == partial ]]; then
              printf 'some hosts do not train; ending the others\n'
              end_training || true
              now=''
            fi
            ;;
        esac
        ;;
      CREATING | STARTING | REPAIRING | RESTARTING) ;;
      ABSENT) create || printf 'no capacity; trying again soon\n' ;;
      PREEMPTED | TERMINATED) delete || true ;;
      *) printf 'the slice is neither ready nor preempted; waiting\n' ;;
    esac
    [[ "$now" == unknown ]] || unanswered=0
    before="$now"
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
