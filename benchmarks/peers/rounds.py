"""Times all frameworks in alternating rounds on the same pinned cores.

Slow drifts of a shared machine then affect all of them alike. See README.md.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import psutil

HERE = pathlib.Path(__file__).resolve().parent
# (shape, what, batch, repeats)
SUITES = {
  'check': [('tiny', 'generate', 2, 1), ('tiny', 'train', 2, 1)],
  'tiny': [
    ('tiny', 'generate', 16, 5),
    ('tiny', 'generate', 64, 3),
    ('tiny', 'train', 16, 5),
    ('tiny', 'train', 64, 3),
  ],
  'qwen': [
    ('qwen05b_4l', 'generate', 16, 3),
    ('qwen05b_4l', 'train', 4, 3),
    ('qwen05b_4l', 'train', 16, 2),
    ('qwen05b_4l', 'generate', 64, 2),
  ],
}
OURS = {'generate': '../generate.py', 'train': '../learner.py'}


def _programs(options: argparse.Namespace, what: str) -> dict[str, list[str]]:
  """Returns the frameworks' commands."""
  commands = {'gigpo_jax': [sys.executable, str(HERE / OURS[what])]}
  if options.tunix:
    commands['tunix'] = [options.tunix, str(HERE / 'time_tunix.py')]
  if options.torch:
    commands['transformers'] = [options.torch, str(HERE / 'time_torch.py')]
  return commands


def _run(
  command: list[str], env: dict[str, str], timeout: float, min_free_gib: float
) -> tuple[int | str, str]:
  """Returns the exit status, or why the command was ended, and its stderr."""
  with tempfile.TemporaryFile('w+') as errors:
    process = subprocess.Popen(
      command, env=env, stdout=subprocess.DEVNULL, stderr=errors
    )
    end = time.monotonic() + timeout
    status: int | str | None = None
    while status is None:
      try:
        status = process.wait(0.5)
      except subprocess.TimeoutExpired:
        if psutil.virtual_memory().available < min_free_gib * 2**30:
          status = 'out of memory'
        elif time.monotonic() > end:
          status = 'timeout'
        if status:
          process.kill()
          process.wait()
    errors.seek(0)
    return status, errors.read()


def _environment(options: argparse.Namespace) -> dict[str, str]:
  path = [str(HERE), str(HERE.parents[1]), os.environ.get('PYTHONPATH', '')]
  threads = str(options.threads)
  return os.environ | {
    'BENCH_OUT': os.path.abspath(options.out),
    'JAX_PLATFORMS': 'cpu',
    'MKL_NUM_THREADS': threads,
    'OMP_NUM_THREADS': threads,
    'PYTHONPATH': os.pathsep.join(filter(None, path)),
    'TOKENIZERS_PARALLELISM': 'false',
  }


def main() -> None:
  """Appends a row of JSON to --out for each job of each round."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--tunix', help='python with google-tunix')
  parser.add_argument('--torch', help='python with torch and transformers')
  parser.add_argument('--suite', default='tiny', choices=SUITES)
  parser.add_argument('--what', choices=OURS, help='only these jobs')
  parser.add_argument('--rounds', type=int, default=3)
  parser.add_argument('--threads', type=int, default=1)
  parser.add_argument('--core', type=int, help='first core to pin to')
  parser.add_argument('--timeout', type=float, default=3600)
  parser.add_argument('--min_free_gib', type=float, default=1.2)
  parser.add_argument('--out', default='results.jsonl')
  options = parser.parse_args()
  cores = sorted(os.sched_getaffinity(0))[-options.threads :]
  if options.core is not None:
    cores = list(range(options.core, options.core + options.threads))
  os.sched_setaffinity(0, cores)  # Children inherit it.
  env = _environment(options)
  jobs = [
    (n, job)
    for n in range(options.rounds)
    for job in SUITES[options.suite]
    if options.what in (None, job[1])
  ]
  failed = False
  for n, (shape, what, batch, repeats) in jobs:
    for name, program in _programs(options, what).items():
      flags = {
        'shape': shape,
        'what': what,
        'batch': batch,
        'repeats': repeats,
        'threads': options.threads,
      }
      command = program + [f'--{key}={value}' for key, value in flags.items()]
      start = time.monotonic()
      status, errors = _run(command, env, options.timeout, options.min_free_gib)
      secs = time.monotonic() - start
      print(
        f'round {n}: {name} {shape} {what} of {batch}: status {status}, '
        f'{secs:.0f} s',
        flush=True,
      )
      if status:
        failed = True
        print(errors[-1500:], file=sys.stderr, flush=True)
        row = {'framework': name, 'failed': str(status)} | flags
        with open(options.out, 'a') as file:
          file.write(json.dumps(row) + '\n')
  sys.exit(failed)


if __name__ == '__main__':
  main()
