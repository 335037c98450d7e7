"""Tests of matching learning rates by the KL of their updates."""

import pytest

from gigpo_jax.tools import match_rate, sweep_table


def write_table(path, runs):
  """Writes (name, seed, iteration, ratio/kl) as the CSV of a sweep."""
  rows = [
    {'experiment': 'alfworld', 'name': name, 'seed': seed}
    | {'iteration': iteration, 'ratio/kl': kl}
    for name, seed, iteration, kl in runs
  ]
  sweep_table.write(path, rows)


# gigpo: (10 * 1e-4 + 30 * 5e-4) / 40 = 4e-4. grpo: 1e-4 at 1e-4, 16e-4 at 4e-4.
RUNS = [
  ('gigpo 0.0002', 0, 0, ''),
  ('gigpo 0.0002', 0, 10, 1e-4),
  ('gigpo 0.0002', 0, 40, 5e-4),
  ('grpo 0.0001', 0, 10, 0.5e-4),
  ('grpo 0.0001', 1, 10, 1.5e-4),
  ('grpo 0.0004', 0, 10, 16e-4),
]


def run(path, capsys, **options):
  options = {'target': 'gigpo 0.0002', 'method': 'grpo'} | options
  flags = [f'--{name}={value}' for name, value in options.items()]
  code = match_rate.main([str(path), '--experiment=alfworld', *flags])
  return code, capsys.readouterr()


def test_rate_is_interpolated_in_logarithms(tmp_path, capsys):
  path = tmp_path / 'tuning.csv'
  write_table(path, RUNS)
  # In logarithms, 4e-4 is half way from 1e-4 to 16e-4, and 2e-4 from 1e-4 to
  # 4e-4.
  code, printed = run(path, capsys)
  assert code == 0
  assert 'gigpo 0.0002: 0.0004 nats' in printed.out
  assert 'grpo moves as far as gigpo 0.0002 at 0.0002' in printed.out


def test_names_without_a_rate_are_other_runs(tmp_path, capsys):
  path = tmp_path / 'tuning.csv'
  write_table(path, [*RUNS, ('grpo 4e-4, 512 levels', 0, 10, 1e-4)])
  code, printed = run(path, capsys)
  assert code == 0 and 'at 0.0002' in printed.out


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'target': 'ppo'}, '--target=ppo: no such run; must be one of gigpo 0.0'),
    ({'experiment': 'alf'}, '--experiment=alf: not in '),
    ({'method': 'gigpo'}, '--target: its ratio/kl is 0.0004, but the rates'),
  ],
)
def test_mistakes_are_refused_in_one_line(tmp_path, capsys, options, message):
  path = tmp_path / 'tuning.csv'
  write_table(path, RUNS)
  code, printed = run(path, capsys, **options)
  assert code == 2
  assert printed.err.startswith(message) and printed.err.count('\n') == 1
