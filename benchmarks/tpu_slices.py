"""Check which model trains on which TPU slice, by compilation only.

    python benchmarks/tpu_slices.py --out slices.jsonl          # takes hours
    python benchmarks/tpu_slices.py --out slices.jsonl --table

Appends a line for each model and slice that the file lacks, so a rerun
continues. `--table` prints the file. Needs libtpu: pip install -e '.[tpu]'.
"""

import argparse
import json
import math
import os
import pathlib
import subprocess
import sys

MODELS = {'0.5B': '0.5b', '1.5B': '1.5b', '7B': '7b', '32B': '7b'}
SLICES = {
  'v5e-4': 'v5e:2x2',
  'v5e-8': 'v5e:2x4',
  'v5e-16': 'v5e:4x4',
  'v5e-64': 'v5e:8x8',
  'v5e-256': 'v5e:16x16',
  'v5p-8': 'v5p:2x2x1',
  'v5p-64': 'v5p:2x4x4',
  'v6e-8': 'v6e:2x4',
  'v6e-64': 'v6e:8x8',
}
# Options that save memory, for slices that are too small for the defaults.
LEAN = {
  'optimizer.mu_dtype': 'bfloat16',
  'learner.microbatch_tokens': 1,
  'rollout.batch_buckets': (32,),
  'rollout.weights': 'int8',
  'loss.kl_weight': 0.0,
}


def examine(model: str, name: str, *, lean: bool) -> dict:
  """Returns the estimate for a model on a slice."""
  from configs import alfworld
  from gigpo_jax.tools import tpu_compile

  config = alfworld.get_config(MODELS[model])
  if lean:
    config.update_from_flattened_dict(LEAN)
  report = tpu_compile.estimate(config, SLICES[name], shape=f'Qwen2.5-{model}')
  largest = max(report.programs, key=lambda p: p.total)
  return {
    'model': model,
    'slice': name,
    'lean': lean,
    'fits': not report.not_fitting,
    'short': report.not_fitting,
    'program': largest.name,
    'gib': largest.total / 2**30 if math.isfinite(largest.total) else None,
    'tensor': report.tensor,
    'mesh': report.mesh,
    'remat': report.remat,
    'slots': config.rollout.batch_buckets[-1],
    'microbatch_tokens': config.learner.microbatch_tokens,
    'secs': report.secs,
    'received_gib': {p.name: p.run.received / 2**30 for p in report.programs},
  }


def table(rows: list[dict]) -> None:
  """Prints a table with a cell for each model and slice."""
  for lean in (False, True):
    cells = {(r['model'], r['slice']): r for r in rows if r['lean'] == lean}
    if not cells:
      continue
    print(f'| slice | {" | ".join(MODELS)} |\n|---|{"---|" * len(MODELS)}')
    for name in SLICES:
      row = [_cell(cells.get((model, name))) for model in MODELS]
      if any(row):
        print(f'| {name} | {" | ".join(row)} |')
    print()


def _cell(r: dict | None) -> str:
  if r is None:
    return ''
  used = 'too much' if r['gib'] is None else f'{r["gib"]:.1f} GiB'
  if not r['fits']:
    return f'no: {r["program"]} {used}'
  low, high = r['secs']
  return f'{used}, {r["remat"]}, {low:.0f}-{high:.0f} s'


def main() -> None:
  """Compiles the missing entries of the file, or prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out', type=pathlib.Path, required=True)
  parser.add_argument('--table', action='store_true')
  parser.add_argument('--models', nargs='*', default=list(MODELS))
  parser.add_argument('--slices', nargs='*', default=list(SLICES))
  parser.add_argument('--lean', action='store_true', help=f'with {LEAN}')
  parser.add_argument('--here', action='store_true', help=argparse.SUPPRESS)
  options = parser.parse_args()
  lines = options.out.read_text().splitlines() if options.out.exists() else []
  results = [json.loads(line) for line in lines]
  if options.table:
    table(results)
    return
  done = {(r['model'], r['slice'], r['lean']) for r in results}
  for name in options.slices:
    for model in options.models:
      if (model, name, options.lean) in done:
        continue
      if options.here:
        result = examine(model, name, lean=options.lean)
        with options.out.open('a') as file:
          file.write(json.dumps(result) + '\n')
        continue
      # One process each, because compilers do not free memory.
      only = ['--models', model, '--slices', name, '--here']
      print(model, name, flush=True)
      subprocess.run([sys.executable, *sys.argv, *only], check=False)


if __name__ == '__main__':
  os.environ['JAX_PLATFORMS'] = 'cpu'
  main()
