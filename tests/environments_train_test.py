"""The whole path on each environment: a warm start from nothing, then GiGPO."""

import json
import sys

import programs
import pytest


def _run(script: str, *flags: str) -> str:
  return programs.run([sys.executable, f'launch/{script}.py', *flags])


@pytest.mark.slow
@pytest.mark.parametrize(
  'name', ['gymnasium', 'search_qa', 'sokoban', 'textarena', 'textworld']
)
def test_a_warm_start_and_two_iterations(tmp_path, name: str):
  config = f'--config=configs/{name}.py:smoke'
  _run('sft', config, f'--workdir={tmp_path / "start"}')
  printed = _run(
    'train',
    config,
    f'--config.model.path={tmp_path / "start" / "policy"}',
    f'--workdir={tmp_path / "run"}',
  )
  assert 'EVAL success' in printed
  lines = [
    json.loads(line)
    for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()
  ]
  assert [line['iteration'] for line in lines] == [0, 1, 2]
  for line in lines[:2]:
    assert 0 <= line['train/success_rate'] <= 1
    assert line['train/failed_episodes'] == 0
