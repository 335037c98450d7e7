"""Tests complete runs: warm start from scratch, then GiGPO."""

import json
import sys

import programs
import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
  'name',
  [
    'gymnasium',
    'helpdesk',
    'keydoor',
    'mcp',
    'minigrid',
    'scienceworld',
    'search_qa',
    'sokoban',
    'textarena',
    'textworld',
    'verifiers',
  ],
)
def test_a_warm_start_and_two_iterations(tmp_path, name: str):
  if name in ('mcp', 'minigrid', 'scienceworld', 'verifiers'):
    pytest.importorskip(name)
  # The two commands of the docs, run from another folder.
  for script in ('sft', 'train'):
    printed = programs.run(
      [
        sys.executable,
        str(programs.PROJECT / 'launch' / f'{script}.py'),
        f'--config=configs/{name}.py:smoke',
      ],
      tmp_path,
      PYTHONPATH=str(programs.PROJECT),
    )
  assert 'EVAL success' in printed
  run = tmp_path / 'runs' / f'{name}-smoke'
  stored = json.loads((run / 'config.json').read_text())
  assert stored['model']['path'] == f'runs/{name}-smoke-sft/policy'
  lines = [
    json.loads(line)
    for line in (run / 'metrics.jsonl').read_text().splitlines()
  ]
  assert [line['iteration'] for line in lines] == [0, 1, 2]
  for line in lines[:2]:
    assert 0 <= line['train/success_rate'] <= 1
    assert line['train/failed_episodes'] == 0
