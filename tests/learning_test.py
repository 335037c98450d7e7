"""Tests that the documented commands improve the success rate."""

import json
import sys

import programs
import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'points'), [('alfworld', 15.0), ('webshop', 8.0)]
)
def test_mini_learns(tmp_path, name: str, points: float):
  programs.run(
    [
      sys.executable,
      'launch/train.py',
      f'--config=configs/{name}.py:mini',
      f'--workdir={tmp_path}',
    ],
    timeout=3600,
  )
  lines = (tmp_path / 'metrics.jsonl').read_text().splitlines()
  rates = [
    line['eval/success_rate']
    for line in map(json.loads, lines)
    if line.get('eval/success_rate') is not None
  ]
  assert len(rates) == 3
  assert 100 * (rates[-1] - rates[0]) >= points
