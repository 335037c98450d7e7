"""Tests of the estimates for TPU slices: exchange, time, a real compilation."""

import dataclasses
import importlib.util
import pathlib
import subprocess
import sys

import jax
import preloaded
import pytest

from configs import alfworld
from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import lora, qwen_config
from gigpo_jax.tools import hlo, tpu_compile, tpu_time

ROOT = pathlib.Path(__file__).parents[1]
_COMMAND = [
  sys.executable,
  'launch/tpu_compile.py',
  '--config=configs/alfworld.py:smoke',
]

# All on 4 devices:
# - a loop with a recorded count of 3 trips and an all-gather of 2 x 4 bfloat16;
# - a loop of 4 trips (2 to 10 by twos) with a permute of one int32;
# - an all-reduce of 8 float32, and one of 2 and 3 float32;
# - a reduce-scatter of 64 to 16 float32;
# - an asynchronous all-gather of 40 to 160 bfloat16, split over three fusions
#   with channel 7, one of which is in the loop of 4 trips;
# - an all-gather of 20 to 80 float32 in one of two branches;
# - a loop whose limit is data with a permute of one int32.
_TEXT = """\
HloModule jit_f

%body (p: (s32[], bf16[2,1])) -> (s32[], bf16[2,4]) {
  %x = bf16[2,1]{1,0} get-tuple-element(%p), index=1
  %g = bf16[2,4]{1,0} all-gather(%x), channel_id=1, dimensions={1}
  ROOT %t = (s32[], bf16[2,4]) tuple(%i, %g)
}

%condition (p: (s32[], bf16[2,4])) -> pred[] {
  ROOT %c = pred[] compare(%i, %n), direction=LT
}

%permute (p: s32[]) -> s32[] {
  ROOT %x.1 = s32[] collective-permute(%p), channel_id=2
}

%by_twos (q: (u32[], s32[])) -> (u32[], s32[]) {
  %q = (u32[], s32[]) parameter(0)
  %one = u32[]{:T(128)} constant(1)
  %two = u32[]{:T(128)} constant(2), metadata={}
  %k = u32[]{:T(128)} get-tuple-element(%q), index=0
  %z = s32[] get-tuple-element(%q), index=1
  %y = s32[] call(%z), to_apply=%permute
  %f.1 = (bf16[160], u32[]) fusion(%z), kind=kLoop, calls=%gather_middle
  %k.1 = u32[]{:T(128)} add(%k, %one)
  %k.2 = u32[]{:T(128)} add(%k.1, %one)
  ROOT %t.2 = (u32[], s32[]) tuple(%k.2, %y)
}

%to_ten (p: (u32[], s32[])) -> pred[] {
  %q.1 = (u32[], s32[]) parameter(0)
  %ten = u32[]{:T(128)} constant(10), metadata={}
  %k.3 = u32[]{:T(128)} get-tuple-element(%q.1), index=0
  ROOT %c.1 = pred[] compare(%k.3, %ten), direction=LT
}

%gather_start (p: bf16[40]) -> bf16[160] {
  %p.1 = bf16[40] parameter(0)
  ROOT %g.1 = bf16[160] all-gather(%p.1), channel_id=7, dimensions={0}
}

%gather_middle (p: bf16[40]) -> bf16[160] {
  %p.2 = bf16[40] parameter(0)
  ROOT %g.2 = bf16[160] all-gather(%p.2), channel_id=7, dimensions={0}
}

%gather_end (p: bf16[40]) -> bf16[160] {
  %p.3 = bf16[40] parameter(0)
  ROOT %g.3 = bf16[160] all-gather(%p.3), channel_id=7, dimensions={0}
}

%gathers (p: f32[20]) -> f32[80] {
  %p.4 = f32[20] parameter(0)
  ROOT %u = f32[80] all-gather(%p.4), channel_id=4, dimensions={0}
}

%to_limit (p: (u32[], s32[], u32[])) -> pred[] {
  %q.2 = (u32[], s32[], u32[]) parameter(0)
  %k.4 = u32[] get-tuple-element(%q.2), index=0
  %limit = u32[] get-tuple-element(%q.2), index=2
  ROOT %c.2 = pred[] compare(%k.4, %limit), direction=LT
}

%by_ones (q: (u32[], s32[], u32[])) -> (u32[], s32[], u32[]) {
  %q.3 = (u32[], s32[], u32[]) parameter(0)
  %z.1 = s32[] get-tuple-element(%q.3), index=1
  %y.1 = s32[] call(%z.1), to_apply=%permute
  ROOT %t.3 = (u32[], s32[], u32[]) tuple(%k.5, %y.1, %limit.1)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %w = (s32[], bf16[2,4]) while(%init), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %start = u32[] constant(2)
  %f = bf16[160] fusion(%b), kind=kLoop, calls=%gather_start
  %j = (u32[], s32[]) tuple(%start, %o)
  %v = (u32[], s32[]) while(%j), condition=%to_ten, body=%by_twos, metadata={}
  %f.2 = bf16[160] fusion(%f), kind=kLoop, calls=%gather_end
  %s = f32[8] all-reduce(%a), to_apply=%add
  %s.1 = (f32[2], f32[3]) all-reduce(%b, %d), to_apply=%add
  %d = f32[64] parameter(1)
  %e = f32[16] reduce-scatter(%d), dimensions={0}
  %j.1 = (u32[], s32[], u32[]) tuple(%start, %o, %d)
  %v.1 = (u32[], s32[], u32[]) while(%j.1), condition=%to_limit, body=%by_ones
  %k.9 = f32[8] conditional(%o, %a, %a), branch_computations={%gathers, %none}
  ROOT %r = f32[8] add(%s, %s)
}
"""


def test_a_collective_counts_once_per_trip_of_its_loop():
  # In bytes; a device already has a quarter of each gathered array.
  assert hlo.exchange_bytes(_TEXT) == {
    'all-gather': 3 * (8 - 2) * 2 + (160 - 40) * 2 + (80 - 20) * 4,
    'collective-permute': 4 * 4 + 4,
    'all-reduce': 2 * 8 * 4 + 2 * (2 + 3) * 4,
    'reduce-scatter': (64 - 16) * 4,
  }


def test_combined_collectives_count_all_their_arrays():
  text = """
ENTRY %main (a: f32[8], b: bf16[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  %b = bf16[8] parameter(1)
  %s = (f32[8], bf16[8]) all-reduceSTART(%a, %b), to_apply=%add
  %g = GATHERED all-gatherSTART(%a, %b), dimensions={0}
  %p = PERMUTED collective-permuteSTART(%a), source_target_pairs={{0,1}}
  ROOT %r = f32[8] add(%a, %a)
}
"""
  inputs, outputs = '(f32[8], bf16[8])', '(f32[32], bf16[32])'
  for changes in (
    {'START': '', 'GATHERED': outputs, 'PERMUTED': 'f32[8]'},
    {
      'START': '-start',
      'GATHERED': f'({inputs}, {outputs})',
      'PERMUTED': '(f32[8], f32[8], u32[], u32[])',
    },
  ):
    compiled = text
    for word, by in changes.items():
      compiled = compiled.replace(word, by)
    assert hlo.exchange_bytes(compiled) == {
      'all-reduce': 2 * 8 * (4 + 2),
      'all-gather': (32 - 8) * (4 + 2),
      'collective-permute': 8 * 4,
    }


def test_a_loop_whose_trips_are_data_counts_as_given():
  once, thrice = (hlo.exchange_bytes(_TEXT, trips=n) for n in (1, 3))
  # The loop sends one int32.
  name = 'collective-permute'
  assert thrice.pop(name) - once.pop(name) == 2 * 4
  assert once == thrice


_RUNS = {
  'prepare': tpu_time.Runs(0, 0.0),
  'prefill': tpu_time.Runs(4096, 0.0),
  'decode': tpu_time.Runs(1024, 0.0),
  'accumulate': tpu_time.Runs(40_960, 0.0),
  'apply': tpu_time.Runs(0, 0.0),
}


def _update(**changes):
  """Returns the phase of updates of a dense model of one layer on a chip."""
  model = qwen_config.QwenConfig(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
  )
  model = dataclasses.replace(model, **changes)
  mesh = mesh_lib.make_mesh(1, -1, 1, devices=jax.devices()[:1])
  config = alfworld.get_config('grpo')
  config.loss.kl_weight, config.loss.old_log_probs = 0.0, 'sampler'
  *_, phase = tpu_time.phases(
    config, model, mesh, 1, _RUNS, tpu_time.Workload()
  )
  assert phase.name == 'update'
  return phase


def test_updates_of_adapters_have_one_pass_less():
  full, adapters = _update(), _update(adapters=lora.Lora(1, 1.0))
  # The layer is computed and differentiated for inputs and weights; the head
  # has four passes, over a seventh of the tokens or so.
  assert 0.65 < adapters.flops / full.flops < 0.77
  assert adapters.memory_bytes < full.memory_bytes
  layer = (
    _update(remat='layer'),
    _update(remat='layer', adapters=lora.Lora(1, 1.0)),
  )
  assert 0.7 < layer[1].flops / layer[0].flops < 0.8


def test_a_microbatch_reads_the_weights_of_all_experts():
  experts = {'num_experts': 64, 'experts_per_token': 1}
  one, all_experts = _update(), _update(**experts)
  assert all_experts.flops == pytest.approx(one.flops, rel=0.1)
  # Weights of 64 instead of one MLP, written and read in each of three passes;
  # and gradients, parameters and moments of all experts.
  more = 63 * 3 * 64 * 128
  episodes = 128 * tpu_time.Workload().turns
  count = (all_experts.memory_bytes - one.memory_bytes) / more
  tokens = episodes * 820 / (1 - tpu_time.PADDING)
  microbatches = tokens / 40_960
  assert count > (4 * 3 + 8) * microbatches


@pytest.mark.parametrize(
  ('tokens', 'targets', 'chunks'),
  [
    # A seventh of 35,840 tokens are responses: 320 per shard, at most 480.
    (35_840, (16, 2048), 1),
    # 640 per shard, at most 960: 2 of 4 chunks.
    (71_680, (16, 2048), 2),
    # Room for 512: two chunks of 256.
    (35_840, (16, 512), 2),
  ],
)
def test_chunks_without_responses_are_skipped(tokens, targets, chunks):
  work = tpu_time.Workload(prompt_tokens=600, response_tokens=100)
  assert tpu_time.num_chunks(work, tokens, targets) == chunks


def test_time_ranges_from_the_slowest_part_to_the_sum():
  chip = tpu_time.Chip(100.0, 1.0, 10.0, 5.0)
  phase = tpu_time.Phase('update', 150.0, 30.0, 20.0)
  # 150 FLOP at 75 of 100 FLOP/s, 30 bytes at 10 bytes/s, 20 bytes at 5 bytes/s.
  assert phase.parts(chip) == (2.0, 3.0, 4.0)
  assert phase.secs(chip) == (4.0, 9.0)


@pytest.mark.parametrize('draft_tokens', [0, 4])
def test_drafts_are_named_as_missing_from_the_time(capsys, draft_tokens):
  config = alfworld.get_config('tiny')
  config.rollout.draft_tokens = draft_tokens
  chip, phase = tpu_time.CHIPS['v5e'], tpu_time.Phase('decode', 1.0, 1.0, 1.0)
  report = tpu_compile.Report(1, 'v5e:1x1', chip, {}, 1, 'none', (), (phase,))
  tpu_compile._print_phases(report, config, tpu_time.Workload())
  line = 'drafts (rollout.draft_tokens=4) are not in this time'
  assert (line in capsys.readouterr().out) == bool(draft_tokens)


@pytest.mark.parametrize(
  ('topology', 'shape', 'message'),
  [
    ('v5e', '', '--topology=v5e: unknown; must be like v5e:4x4'),
    ('h100:2x2', '', '--topology=h100:2x2: unknown; must be like v5e:4x4'),
    ('v5e:0x4', '', '--topology=v5e:0x4: unknown; must be like v5e:4x4'),
    ('v5e:2x2', 'Qwen9', '--shape=Qwen9: unknown; must be one of Qwen2.5-0.5B'),
  ],
)
def test_invalid_flags_are_refused_in_one_line(topology, shape, message):
  flags = f'--topology={topology}', f'--shape={shape}'
  process = preloaded.Process([*_COMMAND, *flags])
  _, errors = process.communicate()
  assert process.returncode == 2
  assert message in errors
  assert len(errors.splitlines()) == 1


def test_invalid_fields_are_refused_before_compilation():
  config = alfworld.get_config('1.5b')
  config.rollout.cache = 'fp8'
  with pytest.raises(ValueError, match='rollout.cache=fp8: unknown'):
    tpu_compile.estimate(config, 'v5e:2x2')


def _run(*flags: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [*_COMMAND, *flags],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )


def _needs(package: str, extra: str):
  return pytest.mark.skipif(
    not importlib.util.find_spec(package),
    reason=f"needs pip install '.[{extra}]'",
  )


@pytest.mark.slow
@pytest.mark.parametrize('share_prompts', [False, True])
@pytest.mark.parametrize(
  'topology',
  [
    pytest.param('v5e:2x2', marks=_needs('libtpu', 'tpu')),
    pytest.param('h100:2', marks=_needs('jax_cuda13_plugin', 'cuda')),
  ],
)
def test_a_small_experiment_fits_a_few_chips(topology, share_prompts):
  process = _run(
    f'--topology={topology}',
    f'--config.learner.share_prompts={share_prompts}',
    '--config.model.dtype=bfloat16',
  )
  assert process.returncode == 0, process.stderr
  # This experiment has no reference policy.
  programs = ('prepare', 'prefill', 'decode', 'outputs', 'accumulate', 'apply')
  for name in (*programs, 'log-probs', 'update', 'iteration'):
    assert f'| {name} |' in process.stdout
  assert 'fits' in process.stdout.splitlines()
  assert 'from perfect overlap to none' in process.stdout
