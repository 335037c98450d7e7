"""Tests of all commands: help, suggestions, Ctrl-C, file permissions."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
from programs import PROJECT

from configs import alfworld
from gigpo_jax import checkpoint
from gigpo_jax.runtime import distributed, files, signals
from launch import command, lines


def _launch(
  script: str, *flags: str, cwd: pathlib.Path = PROJECT
) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, str(PROJECT / f'launch/{script}.py'), *flags],
    cwd=cwd,
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )


def _run_code(code: str, *arguments: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, '-c', code, *arguments],
    cwd=PROJECT,
    capture_output=True,
    text=True,
    check=False,
    timeout=300,
  )


@pytest.mark.parametrize('script', ['train', 'evaluate', 'sft'])
def test_help_shows_flags_variants_and_examples(script):
  done = _launch(script, '--help')
  assert done.returncode == 0 and not done.stderr
  for words in ('  --config\n', '  --workdir\n', 'configs/webshop.py:', 'grpo'):
    assert words in done.stdout, words
  assert done.stdout.count(f'    python launch/{script}.py --config=') == 3
  for size in alfworld.SIZES:
    assert re.search(rf'alfworld.py:.*\b{size}\b', done.stdout), size


@pytest.mark.parametrize('script', ['serve', 'sweep', 'view'])
def test_help_shows_usage_flags_and_examples(script):
  done = _launch(script, '--help')
  assert done.returncode == 0 and not done.stderr
  assert f'    python launch/{script}.py --' in done.stdout
  assert done.stdout.count('  --workdir\n      ') == 1
  # Those of training.
  assert ('  --grace_secs (25.0)\n' in done.stdout) == (script == 'serve')


def test_a_command_without_a_work_directory_has_no_such_flag():
  done = _launch('tpu_compile', '--help')
  assert '  --topology (v5e:4x4)\n' in done.stdout
  assert 'workdir' not in done.stdout
  flags = '--config=configs/alfworld.py:tiny', '--workdir=x'
  done = _launch('tpu_compile', *flags)
  assert done.returncode == 2
  assert done.stderr.startswith("Unknown command line flag 'workdir'")
  assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
  ('flag', 'instead'),
  [
    ('learner.epochs=2', '; set sft.epochs'),
    ('num_iterations=2', ''),
    ('loss.kl_weight=0.5', ''),
    ('loss.entropy_band.low=0.1', ''),
    ('algorithm.name=grpo', ''),
    ('guard.max_kl=0.1', ''),
  ],
)
def test_a_warm_start_refuses_flags_without_effect(flag, instead):
  flags = '--config=configs/alfworld.py:tiny', f'--config.{flag}'
  done = _launch('sft', *flags, '--config.algorithm.anchor=state')
  assert done.returncode == 2
  assert done.stderr == f'{flag}: has no effect on this command{instead}\n'


@pytest.mark.parametrize(
  ('result', 'message'),
  [
    ("{'num_iterations': 3}", 'a dict; must return a config that starts from'),
    ('None', 'a NoneType; must'),
    ('ConfigDict({"seed": 0})', 'a config without '),
  ],
)
def test_config_files_must_start_from_the_base(tmp_path, result, message):
  file = tmp_path / 'own.py'
  file.write_text(
    'from ml_collections import ConfigDict\n'
    f'def get_config(variant=""):\n  return {result}\n'
  )
  with pytest.raises(
    ValueError, match=f'own.py: get_config returned {message}'
  ):
    command._check_config_file([f'--config={file}'])


def _write_command(tmp_path: pathlib.Path, body: str) -> pathlib.Path:
  """Writes a command with this body; returns its script."""
  script = tmp_path / 'script.py'
  script.write_text(
    'import logging, sys, types\n'
    'from gigpo_jax.runtime import output\nfrom launch import command\n'
    f'def main(config, workdir):\n{textwrap.indent(body, "  ")}\n'
    'with output.handle():\n  command.run(main)\n'
  )
  return script


def _errors_of(tmp_path: pathlib.Path, body: str) -> str:
  """Returns what a command with this body, which succeeds, prints to stderr."""
  script = _write_command(tmp_path, body)
  done = subprocess.run(
    [sys.executable, script, '--config=configs/alfworld.py:tiny'],
    capture_output=True,
    text=True,
    cwd=PROJECT,
    env=os.environ | {'PYTHONPATH': str(PROJECT)},
    check=True,
  )
  return done.stderr


def test_warnings_of_jax_alone_are_shown(tmp_path):
  errors = _errors_of(
    tmp_path,
    "logging.getLogger('jax._src.xla_bridge').warning('no GPU')\n"
    "logging.getLogger('absl').warning('saved')",
  )
  assert 'no GPU' in errors and 'saved' not in errors


def test_late_errors_of_a_failed_write_are_dropped(tmp_path):
  late = (
    "error = RuntimeError('Event loop is closed')\n"
    'late = types.SimpleNamespace(exc_value=error, object=None)\n'
    'sys.unraisablehook(late)'
  )
  assert not _errors_of(tmp_path, late)
  other = (
    'class Other:\n'
    '  def __del__(self):\n'
    "    raise RuntimeError('Event loop is closed')\n"
    'Other()'
  )
  assert 'Event loop is closed' in _errors_of(tmp_path, other)


@pytest.mark.parametrize(
  ('body', 'status', 'error'),
  [
    ("console.log('b')", 128 + signal.SIGPIPE, ''),
    # Any text, wherever OSErrors are handled, also if stderr is closed.
    (
      "os.close(2)\ntry:\n  print('b')\nexcept Exception:\n  pass",
      128 + signal.SIGPIPE,
      '',
    ),
    ("raise BrokenPipeError(32, 'worker')", 1, 'BrokenPipeError: .* worker'),
    ("try:\n  1 / 0\nfinally:\n  console.log('b')", 1, 'ZeroDivisionError: '),
  ],
)
def test_a_closed_pipe_hides_no_other_error(tmp_path, body, status, error):
  script = _write_command(
    tmp_path,
    'import os\nfrom gigpo_jax.runtime import console\n'
    f'sys.stdin.read()\n{body}',
  )
  with subprocess.Popen(
    [sys.executable, script, '--config=configs/alfworld.py:tiny'],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    cwd=PROJECT,
    env=os.environ | {'PYTHONPATH': str(PROJECT)},
  ) as process:
    process.stdout.close()
    process.stdin.close()
    errors = process.stderr.read()
  assert process.returncode == status
  assert re.search(error, errors) if error else not errors


def _output_of(name: str, command: list) -> tuple[int, str]:
  """Returns status and errors of a command whose stdout is a file."""
  with open(name, 'w') as stdout:
    done = subprocess.run(
      list(map(str, command)),
      cwd=PROJECT,
      stdout=stdout,
      stderr=subprocess.PIPE,
      env=os.environ | {'PYTHONPATH': str(PROJECT)},
      text=True,
      check=False,
    )
  return done.returncode, done.stderr


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='needs /dev/full')
@pytest.mark.parametrize('script', ['own', 'sweep', 'view'])
def test_a_full_disk_under_stdout_is_one_line(tmp_path, script):
  command = PROJECT / f'launch/{script}.py', '--help'
  if script == 'own':
    command = (
      _write_command(tmp_path, "print('text')"),
      '--config=configs/alfworld.py:tiny',
    )
  status, errors = _output_of('/dev/full', [sys.executable, *command])
  assert status == 1
  assert re.fullmatch(
    r'stdout: cannot be written \(.*No space left .*; free space .*\n', errors
  )


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='needs /dev/full')
@pytest.mark.parametrize(
  'module',
  [
    'algorithms',
    *(f'tools.{n}' for n in 'advise compare law match_rate results'.split()),
  ],
)
def test_modules_end_as_commands_do_if_stdout_cannot_be_written(module):
  command = [sys.executable, '-m', f'gigpo_jax.{module}', '--help']
  status, errors = _output_of('/dev/full', command)
  assert status == 1
  assert re.fullmatch(r'stdout: cannot be written \(.*\n', errors)
  with subprocess.Popen(
    command,
    cwd=PROJECT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  ) as process:
    process.stdout.close()
    assert not process.stderr.read()
  assert process.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize(
  ('variant', 'suggestion'), [('tinny', 'tiny'), ('tiny,grop', 'grpo')]
)
def test_an_unknown_variant_gets_a_suggestion(variant, suggestion):
  with pytest.raises(ValueError, match=rf'; did you mean {suggestion}\? a'):
    alfworld.get_config(variant)


_PRINT = """
from launch import command
def main(config, workdir):
  print(config.loss.dual_clip, config.loss.kl_clamp)
  print(config.learner.length_buckets, config.rollout.prompt_buckets)
command.run(main)
"""


def test_all_unknown_fields_are_reported():
  config = alfworld.get_config('tiny')
  flags = ('loss.foo=1', 'rollout.groups=2', 'rollout.bar=2', 'algorithm=1')
  problems = command._unknown_fields([f'--config.{x}' for x in flags], config)
  assert [line.partition(': ')[0] for line in problems] == [
    'loss.foo=1',
    'rollout.bar=2',
  ]


def test_the_last_value_counts_and_fields_can_be_unset():
  done = subprocess.run(
    [
      sys.executable,
      *('-c', _PRINT),
      '--config=configs/alfworld.py:tiny,reference_code',
      *('--config.loss.kl_clamp=None', '--config.loss.kl_clamp=2.5'),
      *('--config.loss.dual_clip=4.0', '--config.loss.dual_clip=None'),
      *(f'--config.learner.length_buckets={x}' for x in ('(1, 2)', '(3,)')),
      '--config.rollout.prompt_buckets=',
    ],
    cwd=PROJECT,
    capture_output=True,
    text=True,
    check=True,
  )
  assert done.stdout == 'None 2.5\n(3,) ()\n'


@pytest.mark.parametrize(
  ('given', 'expanded'),
  [
    ('--workdir=~/run', '--workdir=/home/ada/run'),
    ('-workdir=~', '-workdir=/home/ada'),
    ('--config.model.path=~/qwen', '--config.model.path=/home/ada/qwen'),
    # Environments interpret their own fields.
    ('--config.env.data_dir=~/games', '--config.env.data_dir=~/games'),
    ('--config.note=see ~/run', '--config.note=see ~/run'),
    ('--workdir=run~', '--workdir=run~'),
  ],
)
def test_a_tilde_is_the_home_folder(monkeypatch, given, expanded):
  monkeypatch.setenv('HOME', '/home/ada')
  assert lines.expand_home(['train.py', given]) == ['train.py', expanded]


def test_a_used_port_suggests_port_zero(tmp_path):
  (tmp_path / 'metrics.jsonl').write_text('{"iteration": 0}\n')
  with socket.create_server(('127.0.0.1', 0)) as server:
    port = server.getsockname()[1]
    done = _launch('view', f'--workdir={tmp_path}', f'--port={port}')
  assert done.returncode == 2
  assert done.stderr.startswith(f'--port={port}: cannot be used at 127.0.0.1')
  assert '--port=0' in done.stderr and len(done.stderr.splitlines()) == 1


_BUSY = """
import hashlib, os, signal, sys
from launch import interrupt
# A background process of a shell inherits an ignored signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
with interrupt.handle():
  interrupt.set_outlook(lambda: 'the same command resumes after iteration 12')
  os.kill(os.getpid(), int(sys.argv[1]))
  # This call delays Python's signal handlers, as a compilation does.
  hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)
"""


@pytest.mark.parametrize(
  'signum, status, word',
  [(signal.SIGINT, 130, 'interrupted'), (signal.SIGTERM, 143, 'terminated')],
)
def test_a_signal_does_not_wait_for_a_running_call(signum, status, word):
  start = time.monotonic()
  done = _run_code(_BUSY, str(signum.value))
  assert done.returncode == status
  assert done.stderr == (
    f'{word}; the same command resumes after iteration 12\n'
  )
  assert time.monotonic() - start < 60


_OWN_HANDLER = """
import os, signal, sys, time
from launch import interrupt
with interrupt.handle():
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
  os.kill(os.getpid(), signal.SIGTERM)
  time.sleep(60)
"""


def test_a_command_may_handle_sigterm_itself():
  done = _run_code(_OWN_HANDLER)
  assert (done.returncode, done.stderr) == (5, '')


_IMPORTING = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Finder:
  def find_spec(self, name, *_):
    if name == 'absl':
      os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ['launch/' + sys.argv[1] + '.py', '--help']
runpy.run_path(sys.argv[0], run_name='__main__')
"""


@pytest.mark.parametrize(
  'script',
  ['evaluate', 'serve', 'sft', 'sweep', 'tpu_compile', 'train', 'view'],
)
def test_an_interrupt_while_importing_is_one_line(script):
  done = _run_code(_IMPORTING, script)
  assert done.returncode == 130
  assert done.stderr == 'interrupted; nothing was started\n'


def test_a_config_names_modules_of_the_current_folder(tmp_path):
  (tmp_path / 'my_algorithm.py').write_text("raise OSError('imported')")
  done = _launch(
    'train',
    '--config=configs/alfworld.py:smoke',
    '--config.algorithm.name=my_algorithm',
    cwd=tmp_path,
  )
  assert done.returncode == 2
  assert 'algorithm.name=my_algorithm: ' in done.stderr
  assert 'imported (my_algorithm.py:1' in done.stderr


_GROUP = """
import os, signal, sys, time
from launch import interrupt
if __name__ == '__main__':
  signal.signal(signal.SIGINT, signal.default_int_handler)
  with interrupt.handle():
    from gigpo_jax.runtime import worker_process
    clock = worker_process.Clock()
    workers = [worker_process.start('toy', {}, clock) for _ in range(2)]
    time.sleep(0.5)
    os.killpg(0, signal.SIGINT)
    time.sleep(60)
time.sleep(1)  # In the workers, which import this file.
"""


def test_ctrl_c_on_a_terminal_prints_one_line_while_workers_import(tmp_path):
  script = tmp_path / 'trainer.py'
  script.write_text(_GROUP)
  done = subprocess.run(
    [sys.executable, str(script)],
    env=os.environ | {'PYTHONPATH': str(PROJECT)},
    capture_output=True,
    text=True,
    check=False,
    start_new_session=True,
    timeout=300,
  )
  assert done.returncode == 130
  assert done.stderr == 'interrupted; nothing was started\n'


def test_resume_message_without_a_complete_checkpoint(tmp_path):
  expected = 'there is no checkpoint yet; the same command starts again'
  assert checkpoint.describe_resume(tmp_path / 'none') == expected
  (tmp_path / '7').mkdir()
  assert checkpoint.describe_resume(tmp_path) == expected


def test_a_signal_reaches_all_listeners():
  received = []
  with signals.listen(signal.SIGINT, lambda: received.append('outer')):
    with signals.listen(signal.SIGTERM, lambda: received.append('inner')):
      before = signal.signal(signal.SIGINT, lambda *_: None)
      signal.raise_signal(signal.SIGINT)
      signal.signal(signal.SIGINT, before)
  assert received == ['outer']


def test_exported_files_have_the_permissions_of_the_umask(tmp_path):
  with distributed.atomic_directory(tmp_path / 'policy') as folder:
    inside = pathlib.Path(folder, 'inside')
    inside.mkdir(parents=True)
    (inside / 'weights').touch(mode=0o600)
  (tmp_path / 'plain').touch()
  mode = (tmp_path / 'policy' / 'inside' / 'weights').stat().st_mode
  assert mode == (tmp_path / 'plain').stat().st_mode
  files.open_to_umask(tmp_path)


def test_every_script_has_a_console_command():
  text = (PROJECT / 'setup.py').read_text()
  commands = dict(re.findall(r"'(gigpo-[\w-]+)=([\w.]+):main'", text))
  assert commands.pop('gigpo-compare') == 'gigpo_jax.tools.compare'
  # The scripts are not imported: two of them define the same flags.
  scripts = {
    path.stem
    for path in (PROJECT / 'launch').glob('*.py')
    if "if __name__ == '__main__':\n  main()" in path.read_text()
  }
  assert {
    name.removeprefix('gigpo-').replace('-', '_') for name in commands
  } == scripts


def test_a_console_command_prints_the_help_of_its_script():
  code = 'import sys; sys.argv = ["gigpo-train", "--help"]\n'
  code += 'from launch.train import main; main()'
  done = _run_code(code)
  assert done.returncode == 0
  assert 'allow_config_change' in done.stdout
  assert done.stdout == _launch('train', '--help').stdout
