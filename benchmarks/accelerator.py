"""Measure an accelerator: start, limits, decode, prefill, updates, iterations.

    python benchmarks/accelerator.py --out=measured                # 40 minutes
    python benchmarks/accelerator.py --out=measured --minutes=9    # in parts
    python benchmarks/accelerator.py --out=measured --shape=tiny   # a CPU

Runs each part in its own process with a time limit, the most valuable first,
and writes OUT/SHAPE/table.md after each. A part that fails or takes too long
keeps the results that it has, and the others run. A rerun continues with the
parts that are missing, so repeat a command with few minutes. `--retry` also
repeats the parts that did not succeed; `--parts=update,small` selects parts by
the start of their names. Traces for xprof are in OUT/SHAPE/traces, the output
of the parts in OUT/SHAPE/logs.

Weights are random, and lengths of episodes are forced (`forced.py`), so nothing
is downloaded. Updates are compiled without a persistent cache, everything else
with the one in OUT/SHAPE/programs. On a GPU, an update is also compiled with
flags that may shorten the compilation.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import accelerator_table

from envs import processes

SHAPES = ('tiny', '0.5b', '1.5b', '7b')
# First argument of the process of a part.
_PART = 'part'
# Seconds from SIGTERM to SIGKILL of a part; a training run saves its state.
_GRACE_SECS = 20.0
# The line of an exception; notes and further lines may follow it.
_ERROR = re.compile(r'[\w.]+(Error|Exception)\b')
# Statuses after which a part is not repeated.
_FINAL = ('done', 'failed', 'too long')
_GPU_FLAGS = {
  'no-checks': '--xla_gpu_autotune_level=2',
  'no-autotuning': '--xla_gpu_autotune_level=0',
  'no-fusion-autotuner': '--xla_gpu_experimental_enable_fusion_autotuner=false',
  'no-triton-gemm': '--xla_gpu_enable_triton_gemm=false',
  'parallel': f'--xla_gpu_force_compilation_parallelism={os.cpu_count()}',
  'no-command-buffers': '--xla_gpu_enable_command_buffer=',
}
# Fields of the config that change a decode step, by platform.
_DECODE_FIELDS = {
  'gpu': {'xla': 'model.decode_attention=xla'},
  'tpu': {'paged': 'model.decode_attention=paged'},
}
# With these fields, 80 GB suffice for 1.5B without recomputed layers.
_MATRICES = ('model.remat=matrices', 'learner.microbatch_tokens=16384')
_GPU_DECODE_FLAGS = {
  'while-command-buffers': '--xla_gpu_enable_command_buffer=+WHILE',
  'no-command-buffers': '--xla_gpu_enable_command_buffer=',
}


@dataclasses.dataclass(frozen=True)
class Part:
  """A measurement in its own process.

  Attributes:
    name: its name, which begins with a function of accelerator_parts.py.
    limit_secs: longest time.
    need_secs: it is not started if less time is left.
    arguments: further arguments of its process.
    flags: added to XLA_FLAGS.
  """

  name: str
  limit_secs: float
  need_secs: float = 60.0
  arguments: tuple[str, ...] = ()
  flags: str = ''

  def with_fields(self, *changes: str) -> 'Part':
    """Returns the part with changes of the config, such as 'field=value'."""
    fields = (x for change in changes for x in ('--field', change))
    return dataclasses.replace(self, arguments=(*self.arguments, *fields))


def make_parts(platform: str, *, quick: bool) -> list[Part]:
  """Returns the parts, the most valuable first.

  Args:
    platform: 'cpu', 'gpu' or 'tpu'; '' if it is not known yet.
    quick: whether to measure one setting of each, as on a CPU.
  """

  def update(remat: str, variant: str = '', flags: str = '') -> Part:
    name = '-'.join(filter(None, ('update', remat, variant)))
    return Part(name, 420.0, 120.0, ('--remat', remat), flags)

  def decode(prompt: int, variant: str = '', flags: str = '') -> Part:
    name = '-'.join(filter(None, ('decode', str(prompt), variant)))
    return Part(name, 240.0, 60.0, ('--prompt', str(prompt)), flags)

  parts = [
    Part('check', 120.0, 40.0),
    Part('rates', 120.0, 20.0),
    Part('cold', 500.0, 240.0),
    Part('iteration', 515.0, 300.0),
    update('layer'),
    decode(1024),
    Part('warm', 240.0, 60.0),
    Part('small', 300.0, 120.0),
  ]
  if quick:
    return parts
  fields = _DECODE_FIELDS.get(platform, {}) | {
    'int8-cache': 'rollout.cache=int8',
    'drafts': 'rollout.draft_tokens=4',
  }
  for variant, field in fields.items():
    parts += [decode(1024, variant).with_fields(field)]
  if platform == 'gpu':
    parts += [
      update('matrices', '16k').with_fields(*_MATRICES),
      Part('iteration-matrices-16k', 515.0, 300.0).with_fields(*_MATRICES),
    ]
    parts += [decode(1024, *item) for item in _GPU_DECODE_FLAGS.items()]
    parts += [update('layer', *item) for item in _GPU_FLAGS.items()]
    parts += [Part('torch', 300.0, 120.0)]
  # With default options, the last two need more than 80 GB for 1.5B.
  others = [decode(512), decode(2048), update('matrices'), update('none')]
  return parts + others


def select_part(
  parts: Sequence[Part],
  statuses: Mapping[str, str],
  left_secs: float,
  *,
  quick: bool,
) -> Part | None:
  """Returns the first missing part for which there is time, if any.

  Args:
    parts: all parts in order.
    statuses: status of each part that ran.
    left_secs: seconds that are left.
    quick: whether all parts are short.
  """
  for part in parts:
    if statuses.get(part.name) in _FINAL:
      continue
    if left_secs >= (1.0 if quick else part.need_secs):
      return part
  return None


def run(
  name: str,
  command: Sequence[str],
  out: pathlib.Path,
  limit_secs: float,
  variables: Mapping[str, str] | None = None,
) -> dict:
  """Runs a part in its own process; returns its name, status and seconds.

  The status is 'done', 'failed' or 'too long'. The line of its last error, or
  the last line of its output, is returned too.
  """
  log = out / 'logs' / f'{name}.log'
  log.parent.mkdir(parents=True, exist_ok=True)
  start = time.monotonic()
  with log.open('w') as file:
    process = subprocess.Popen(
      command,
      stdout=file,
      stderr=subprocess.STDOUT,
      env=os.environ | dict(variables or {}),
      start_new_session=True,
    )
    try:
      status = 'failed' if process.wait(limit_secs) else 'done'
    except subprocess.TimeoutExpired:
      status = 'too long'
    finally:
      _end(process)
  lines = log.read_text(errors='replace').split('\n')
  lines = [line for line in lines if line.strip()]
  if status == 'failed':
    lines = [line for line in lines if _ERROR.match(line)] or lines
  last = lines[-1] if lines else ''
  secs = time.monotonic() - start
  return {'part': name, 'status': status, 'secs': secs, 'last': last[:200]}


def _end(process: subprocess.Popen) -> None:
  """Ends the processes of a part, if any are left."""
  for number in (signal.SIGTERM, signal.SIGKILL):
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, number)
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(_GRACE_SECS)
      if number == signal.SIGTERM:
        time.sleep(0.1)  # The others of its group end with it.


def read(path: pathlib.Path) -> list[dict]:
  """Returns the objects of a file of JSON lines; [] if it does not exist."""
  if not path.exists():
    return []
  lines = path.read_text().splitlines()
  # A process that is killed may leave an incomplete line.
  return [json.loads(line) for line in lines if line.endswith('}')]


def write_table(out: pathlib.Path) -> str:
  """Writes and returns the table of the results so far."""
  table = accelerator_table.render(
    read(out / 'records.jsonl'), read(out / 'parts.jsonl'), out.name
  )
  (out / 'table.md').write_text(table)
  return table


def _platform(out: pathlib.Path) -> str:
  found = [r['platform'] for r in read(out / 'records.jsonl') if 'matmul' in r]
  return found[-1] if found else ''


def make_arguments(
  part: Part, shape: str, out: pathlib.Path, slots: str = ''
) -> list[str]:
  """Returns the arguments of the process of a part."""
  arguments = ['--part', part.name, '--shape', shape, '--out', str(out)]
  arguments += ['--slots', slots] if slots else []
  arguments += ['--started', str(time.time()), f'--flags={part.flags}']
  return [*arguments, *part.arguments]


def make_variables(part: Part, out: pathlib.Path) -> dict[str, str]:
  """Returns the environment variables of the process of a part."""
  variables = {
    'XLA_FLAGS': f'{os.environ.get("XLA_FLAGS", "")} {part.flags}'.strip(),
    'JAX_COMPILATION_CACHE_DIR': str(out / 'programs'),
    processes.PARENT_VARIABLE: str(os.getpid()),
  }
  if part.name.startswith('update'):
    variables['JAX_ENABLE_COMPILATION_CACHE'] = 'false'
  if part.name == 'torch':
    # jax would reserve most of the memory that PyTorch needs.
    variables['JAX_PLATFORMS'] = 'cpu'
  return variables


def _measure(
  part: Part, options: argparse.Namespace, out: pathlib.Path, left: float
) -> dict:
  """Runs a part within the time that is left."""
  arguments = make_arguments(part, options.shape, out, options.slots)
  result = run(
    part.name,
    [sys.executable, __file__, _PART, *arguments],
    out,
    min(part.limit_secs, left),
    make_variables(part, out),
  )
  if result['status'] == 'too long' and left < part.limit_secs:
    result['status'] = 'out of time'
  return result


def main() -> None:
  """Runs the missing parts and prints the table, or runs a part."""
  if sys.argv[1:2] == [_PART]:
    # A signal may end the driver before it knows the process of this part.
    processes.end_with_named_parent()
    # The other processes, those of environments too, do not import jax.
    import accelerator_parts

    accelerator_parts.main(sys.argv[2:])
    return
  # Ends the running part as well. After nohup, SIGHUP stays ignored.
  for signum in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(signum) != signal.SIG_IGN:
      signal.signal(signum, lambda signum, _: sys.exit(128 + signum))
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--shape', choices=SHAPES, default='1.5b')
  parser.add_argument('--out', type=pathlib.Path, required=True)
  parser.add_argument('--minutes', type=float, default=40.0)
  parser.add_argument('--parts', default='', help='starts of names: update,…')
  parser.add_argument('--slots', default='', help='of decode: 128,32,…')
  parser.add_argument('--retry', action='store_true')
  options = parser.parse_args()
  out = (options.out / options.shape).resolve()
  out.mkdir(parents=True, exist_ok=True)
  deadline = time.monotonic() + 60 * options.minutes - _GRACE_SECS
  prefixes = tuple(options.parts.split(','))
  statuses = {r['part']: r['status'] for r in read(out / 'parts.jsonl')}
  if options.retry:
    statuses = {k: v for k, v in statuses.items() if v == 'done'}
  quick, missing = options.shape == 'tiny', []
  while True:
    parts = make_parts(_platform(out), quick=quick)
    parts = [p for p in parts if p.name.startswith(prefixes)]
    left = deadline - time.monotonic()
    part = select_part(parts, statuses, left, quick=quick)
    if part is None:
      missing = [p.name for p in parts if statuses.get(p.name) not in _FINAL]
      break
    print(f'{part.name} ...', end=' ', flush=True)
    try:
      result = _measure(part, options, out, left)
      print(f'{result["status"]}, {result["secs"]:.0f} s', flush=True)
      statuses[part.name] = result['status']
      with (out / 'parts.jsonl').open('a') as file:
        file.write(json.dumps(result) + '\n')
    finally:  # Also after SIGTERM, with what the part measured until then.
      write_table(out)
  print(write_table(out))
  if missing:
    print(f'no time for {", ".join(missing)}: repeat the command to continue')


if __name__ == '__main__':
  main()
