"""Tests of launch/tpu_vm.sh: commands, retries, errors, with a fake gcloud."""

import os
import pathlib
import shlex
import shutil
import subprocess

import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / 'launch/tpu_vm.sh'
VM = ('--name=g', '--zone=us-west4-a')
TPU = ['gcloud', 'compute', 'tpus', 'tpu-vm']


def _run(*arguments: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    ['bash', str(SCRIPT), *arguments],
    capture_output=True,
    text=True,
    check=False,
  )


def _commands(*arguments: str) -> list[list[str]]:
  done = _run(*arguments, '--dry-run')
  assert done.returncode == 0, done.stderr
  return [shlex.split(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
  ('slice_type', 'version'),
  [
    ('v5litepod-16', 'v2-alpha-tpuv5-lite'),
    ('v5p-8', 'v2-alpha-tpuv5'),
    ('v6e-64', 'v2-alpha-tpuv6e'),
  ],
)
def test_create(slice_type, version):
  (command,) = _commands('create', *VM, f'--type={slice_type}', '--spot')
  assert command == [
    *TPU,
    'create',
    'g',
    '--zone=us-west4-a',
    f'--accelerator-type={slice_type}',
    f'--version={version}',
    '--spot',
  ]


def test_setup_reaches_all_hosts_and_mounts_the_bucket():
  (command,) = _commands(
    'setup',
    *VM,
    '--repository=https://x/y.git',
    '--bucket=b',
    '--project=p',
    '--then=alfworld-download',
  )
  assert command[4:9] == [
    'ssh',
    'g',
    '--zone=us-west4-a',
    '--project=p',
    '--worker=all',
  ]
  script = command[9].removeprefix('--command=')
  assert 'git clone https://x/y.git gigpo_jax' in script
  assert "uv pip install -q -e '.[alfworld,tpu]'" in script
  assert 'gcsfuse --implicit-dirs --rename-dir-limit=1000000 b runs' in script
  assert script.endswith('; alfworld-download')
  assert (
    subprocess.run(['bash', '-n', '-c', script], check=False).returncode == 0
  )


@pytest.mark.parametrize('command', ['run', 'resume'])
def test_flags_of_a_run_are_passed_unchanged(command):
  flags = ['--config=configs/alfworld.py:7b', '--workdir=runs/a b;rm']
  # Arguments after two dashes are not flags of this script.
  done = _run(command, '--dry-run', *VM, '--', *flags)
  (line,) = done.stdout.splitlines()
  script = shlex.split(line)[-1].removeprefix('--command=')
  train = script.partition('launch/train.py ')[2].partition(' >> ')[0]
  assert shlex.split(train) == flags


def test_logs_and_delete():
  (command,) = _commands('logs', *VM)
  assert '--worker=0' in command
  (command,) = _commands('delete', *VM)
  assert command == [*TPU, 'delete', 'g', '--zone=us-west4-a', '--quiet']


def test_keep_creates_sets_up_and_runs():
  done = _run(
    'keep',
    '--dry-run',
    *VM,
    '--type=v5p-8',
    '--spot',
    '--bucket=b',
    '--repository=u',
    '--',
    '--config=c',
  )
  verbs = [shlex.split(line)[4] for line in done.stdout.splitlines()]
  assert verbs == ['create', 'ssh', 'ssh']


_GCLOUD = """#!/bin/bash
# A fake gcloud: files in $STAGE list the states of the slice and, for each look
# at them, of its hosts. A host that is lost does not answer.
echo "$*" >> "$STAGE/calls"
case "$*" in
  *describe*) head -n 1 "$STAGE/states"; sed -i 1d "$STAGE/states" ;;
  *pkill*) ;;
  *pgrep*)
    read -ra hosts < "$STAGE/hosts"; sed -i 1d "$STAGE/hosts"
    echo 'SSH: Attempting to connect to worker 0...'
    for host in "${hosts[@]}"; do
      test "$host" != lost || exit 255
      echo "activity=$host"
    done ;;
  *' create '*) test ! -e "$STAGE/full" || { rm "$STAGE/full"; exit 1; } ;;
  *'uv venv'*)
    test ! -e "$STAGE/useless" || exit 1
    test ! -e "$STAGE/broken" || { rm "$STAGE/broken"; exit 1; } ;;
esac
"""


def _run_keep(stage, *arguments: str) -> subprocess.CompletedProcess:
  """Runs keep with the programs in a folder before those of $PATH."""
  options = ['--type=v5p-8', '--bucket=b', '--repository=u']
  return subprocess.run(
    ['bash', str(SCRIPT), 'keep', *VM, *options, *arguments],
    capture_output=True,
    text=True,
    check=False,
    timeout=60,
    env=os.environ
    | {'STAGE': str(stage), 'PATH': f'{stage}:{os.environ["PATH"]}'},
  )


def _keep(tmp_path, states: list[str], hosts: list[str], *, ends: int = 0):
  """Runs keep against the fake; returns what it printed and what it called."""
  (tmp_path / 'gcloud').write_text(_GCLOUD)
  (tmp_path / 'gcloud').chmod(0o755)
  (tmp_path / 'states').write_text('\n'.join(states) + '\n')
  (tmp_path / 'hosts').write_text('\n'.join(hosts) + '\n')
  done = _run_keep(tmp_path, '--every=0', '--', '--config=c')
  assert done.returncode == ends, done.stderr
  assert ('finished' in done.stdout.splitlines()[-1]) == (not ends)
  parts = {
    'describe': 'look',
    'pkill': 'end',
    'pgrep': 'look',
    'uv venv': 'setup',
    'nohup': 'start',
    'tail -n 20': 'log',
    'tpu-vm create': 'create',
    'tpu-vm delete': 'delete',
  }
  calls = [
    next((verb for part, verb in parts.items() if part in call), call)
    for call in (tmp_path / 'calls').read_text().splitlines()
  ]
  return done.stdout, [call for call in calls if call != 'look']


def test_keep_retries_until_the_run_is_finished(tmp_path):
  # No capacity, then created; setup fails, then succeeds; preempted; repeated.
  states = ['ABSENT', 'ABSENT', *['READY'] * 3, 'PREEMPTED', 'ABSENT']
  states += ['CREATING', *['READY'] * 3]
  hosts = ['idle', 'idle', 'training', 'idle', 'training', 'finished']
  for name in ('full', 'broken'):
    (tmp_path / name).touch()
  first = ['create', 'create', 'setup', 'setup', 'start', 'delete']
  _, calls = _keep(tmp_path, states, hosts)
  assert calls == [*first, 'create', 'setup', 'start']


def test_keep_watches_all_hosts(tmp_path):
  hosts = [
    'idle idle',
    'training idle',  # Still starting.
    'training training',
    'training lost',  # A host that does not answer is not restarted.
    'idle training',
    'training training',  # It was between two states.
    'training idle',
    'training idle',  # A host stopped: the other waits for it.
    'idle idle',
    'finished training',
    'finished training',  # The other does not end.
    'finished idle',
  ]
  output, calls = _keep(tmp_path, ['READY'] * len(hosts), hosts)
  start = ['setup', 'start']
  assert calls == [*start, 'end', *start, 'end']
  assert output.count('some hosts do not train') == 2


def test_keep_does_not_delete_a_slice_that_was_stopped(tmp_path):
  states = ['READY', 'STOPPED', 'READY', 'READY']
  output, calls = _keep(tmp_path, states, ['idle', 'training', 'finished'])
  assert calls == ['setup', 'start']
  assert output.count('neither ready nor preempted; waiting') == 1


def test_keep_ends_if_training_does_not_start(tmp_path):
  looks = ['READY'] * 8
  hosts = ['idle', 'training', 'idle', 'idle', 'idle', 'training', 'idle']
  output, calls = _keep(tmp_path, looks, [*hosts, 'idle'], ends=1)
  assert calls == [*['setup', 'start'] * 5, 'log']
  assert 'no start led to ten minutes of training' in output


def test_keep_ends_if_setup_always_fails(tmp_path):
  (tmp_path / 'useless').touch()
  output, calls = _keep(tmp_path, ['READY'] * 6, ['idle'] * 6, ends=1)
  assert calls == [*['setup'] * 5, 'log']
  assert output.count('setup failed') == 5
  assert output.endswith('to end the costs, run launch/tpu_vm.sh delete\n')


def test_keep_ends_if_hosts_never_answer(tmp_path):
  hosts = [*['lost'] * 29, 'training', *['lost'] * 30]
  output, calls = _keep(tmp_path, ['READY'] * len(hosts), hosts, ends=1)
  assert calls == []
  assert output.count('not all hosts answer; waiting') == 59
  assert output.endswith('to end the costs, run launch/tpu_vm.sh delete\n')


def test_only_a_run_with_these_flags_is_finished(tmp_path):
  # A host on which the training ends at once: gcloud runs the commands here.
  home = tmp_path / 'home' / 'gigpo_jax'
  programs = {
    'gcloud': 'all="$*"; case "$all" in *describe*) echo READY;; *uv*) ;; '
    '*) cd "$STAGE/home"; bash -c "${all#*--command=}";; esac',
    'pgrep': 'exit 1',
    'mountpoint': 'exit 1',
  }
  (home / '.venv/bin').mkdir(parents=True)
  paths = {tmp_path / name: code for name, code in programs.items()}
  paths[home / '.venv/bin/python'] = 'echo "learning curve: $*"'
  for path, code in paths.items():
    path.write_text(f'#!/bin/bash\n{code}\n')
    path.chmod(0o755)

  def keep(*flags):
    done = _run_keep(tmp_path, '--every=0.5', '--', *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout

  for flags in (['--config=a'], ['--config=a', '--workdir=runs/b c;d']):
    assert 'started' in keep(*flags)
    lines = (home / 'train.log').read_text().splitlines()
    assert lines[-1] == f'learning curve: launch/train.py {" ".join(flags)}'
    # The same command again has nothing to do.
    assert 'started' not in keep(*flags)
  earlier = (home / 'train.log.old').read_text()
  assert 'launch/train.py --config=a\n' in earlier


@pytest.mark.parametrize(
  'options',
  [
    ('--type=v9-8',),
    ('--type=v5p-8', '--repository='),
    ('--type=v5p-8', '--repository=u', '--every=abc'),
    ('--type=v5p-8', '--repository=u', '--bucket=b', '--', '--workdir=/tmp/a'),
  ],
)
def test_keep_refuses_before_it_creates_a_slice(tmp_path, options):
  # A copy outside a repository has no origin.
  script = tmp_path / 'launch/tpu_vm.sh'
  script.parent.mkdir()
  shutil.copyfile(SCRIPT, script)
  arguments = ['keep', *VM, *options, '--bucket=b', '--', '--config=c']
  done = subprocess.run(
    ['bash', str(script), *arguments],
    capture_output=True,
    text=True,
    check=False,
    timeout=60,
  )
  assert done.returncode == 2
  assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (('create', '--zone=z', '--type=v5p-8'), '--name=: missing'),
    (('create', *VM, '--type=v1-8'), '--type=v1-8: unknown; must be v5lite'),
    (('create', *VM, '--tpye=v5p-8'), '--tpye=v5p-8: unknown'),
    (('run', *VM), '--: missing; after it come the flags of launch/train.py'),
    (('grow', *VM), 'grow: unknown; one of create, setup'),
  ],
)
def test_invalid_arguments_are_refused_in_one_line(arguments, message):
  done = _run(*arguments, '--dry-run')
  assert done.returncode == 2
  assert message in done.stderr
  assert len(done.stderr.splitlines()) == 1
  assert not done.stdout


def test_help_prints_the_usage_comment():
  done = _run('help')
  assert done.returncode == 0
  assert 'launch/tpu_vm.sh create' in done.stdout


@pytest.mark.skipif(not shutil.which('shellcheck'), reason='needs shellcheck')
def test_shellcheck_reports_no_problem():
  done = subprocess.run(
    ['shellcheck', str(SCRIPT)], capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stdout
