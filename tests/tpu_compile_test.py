"""Tests of the estimates for TPU slices: collectives and a real compilation."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

from gigpo_jax.tools import tpu_compile

ROOT = pathlib.Path(__file__).parents[1]

# A loop of three trips with an all-gather of 2 x 4 bfloat16; a loop up to four
# with a collective-permute of one int32; an all-reduce of 8 float32; a
# reduce-scatter of 64 float32; and an all-gather of 80 float32 in one of two
# branches.
_TEXT = """\
HloModule jit_f

%body (p: (s32[], bf16[2,4])) -> (s32[], bf16[2,4]) {
  %g = bf16[2,4]{1,0} all-gather(%x), dimensions={0}
  ROOT %t = (s32[], bf16[2,4]) tuple(%i, %g)
}

%condition (p: (s32[], bf16[2,4])) -> pred[] {
  ROOT %c = pred[] compare(%i, %n), direction=LT
}

%started (p: s32[]) -> s32[] {
  ROOT %x = s32[] collective-permute(%p), channel_id=1
}

%to_four (p: s32[]) -> pred[] {
  %c.2 = s32[]{:T(128)} constant(4), metadata={}
  ROOT %c = pred[] compare(%p, %c.2), direction=LT
}

%gathers (p: f32[8]) -> f32[8] {
  ROOT %u = f32[80] all-gather(%p), dimensions={0}
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %w = (s32[], bf16[2,4]) while(%init), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %v = s32[] while(%j), condition=%to_four, body=%started, metadata={}
  %s = (f32[1], f32[8]) all-reduce-start(%a), to_apply=%add
  %d = f32[64] parameter(1)
  %e = f32[8] reduce-scatter(%d), dimensions={0}
  %k = f32[8] conditional(%q, %a, %a), branch_computations={%gathers, %started}
  ROOT %r = f32[8] all-reduce-done(%s)
}
"""


def test_collectives_are_counted_once_per_trip_of_their_loop():
  loops, sums, branch = 3 * 2 * 4 * 2 + 4 * 4, 2 * 8 * 4 + 64 * 4, 80 * 4
  assert tpu_compile.collective_bytes(_TEXT) == loops + sums + branch


@pytest.mark.parametrize(
  ('topology', 'shape', 'message'),
  [
    ('v5e', '', '--topology=v5e: unknown; must be like v5e:4x4'),
    ('h100:2x2', '', '--topology=h100:2x2: unknown'),
    ('v5e:2x2', 'Qwen9', '--shape=Qwen9: unknown; must be one of Qwen2.5-0.5B'),
  ],
)
def test_invalid_flags_are_refused_in_one_line(topology, shape, message):
  process = _run(f'--topology={topology}', f'--shape={shape}')
  assert process.returncode == 2
  assert message in process.stderr
  assert len(process.stderr.splitlines()) == 1


def _run(*flags: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [
      sys.executable,
      'launch/tpu_compile.py',
      '--config=configs/alfworld.py:smoke',
      *flags,
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )


@pytest.mark.slow
@pytest.mark.skipif(
  not importlib.util.find_spec('libtpu'), reason="needs pip install '.[tpu]'"
)
def test_a_small_experiment_fits_a_small_slice():
  process = _run('--topology=v5e:2x2')
  assert process.returncode == 0, process.stderr
  for name in ('prepare', 'prefill', 'decode', 'accumulate', 'apply'):
    assert f'| {name} |' in process.stdout
  assert 'fits' in process.stdout.splitlines()
  assert 'roofline of an iteration' in process.stdout
