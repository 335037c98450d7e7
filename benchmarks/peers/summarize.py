"""Prints medians over rounds, and the speed of gigpo_jax relative to others.

python benchmarks/peers/summarize.py tiny.jsonl qwen.jsonl
"""

import collections
import json
import pathlib
import statistics
import sys

RATES = {
  'prefill': 'prefill_tok_per_cpu_s',
  'decode': 'decode_tok_per_cpu_s',
  'new tokens': 'new_tok_per_cpu_s',
  'trained tokens': 'train_tok_per_cpu_s',
}
# Shares of the core's matmul rate, measured in the same process.
SHARES = {
  'prefill': 'prefill_matmul_share',
  'decode': 'decode_matmul_share',
  'update': 'train_matmul_share',
}


def main() -> None:
  """Prints a table: tokens per CPU second, ratios in brackets; and shares."""
  rows = collections.defaultdict(list)
  for path in sys.argv[1:]:
    for line in pathlib.Path(path).read_text().splitlines():
      row = json.loads(line)
      if 'failed' in row:
        print('failed:', row)
      else:
        key = (row['shape'], row['what'], row['batch'])
        rows[key, row['framework']].append(row)
  heads = ['shape', 'what', 'batch', 'framework', 'rounds', *RATES]
  print('| ' + ' | '.join(heads) + ' |')
  print('|' + '---|' * len(heads))
  for (job, framework), same_job in sorted(rows.items()):
    cells = [*map(str, job), framework, str(len(same_job))]
    for name in RATES.values():
      values = [row[name] for row in same_job if name in row]
      ours = [
        row[name] for row in rows.get((job, 'gigpo_jax'), ()) if name in row
      ]
      cell = f'{statistics.median(values):,.0f}' if values else ''
      if values and ours and framework != 'gigpo_jax':
        ratio = statistics.median(ours) / statistics.median(values)
        cell += f' ({ratio:.2f})'
      cells.append(cell)
    print('| ' + ' | '.join(cells) + ' |')
  for (job, _), same_job in sorted(rows.items()):
    for name, key in SHARES.items():
      if values := [row[key] for row in same_job if key in row]:
        share = statistics.median(values)
        print(f'{" ".join(map(str, job))}: {name} {share:.0%} of matmul rate')


if __name__ == '__main__':
  main()
