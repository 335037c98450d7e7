"""Tests of adapters per agent: each row equals a model with one adapter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

from configs import alfworld
from envs import base
from gigpo_jax import batch, learner, losses, packing, rollout, sampler, sft
from gigpo_jax import config as config_lib
from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import huggingface, lora, qwen

AGENTS = ('planner', 'actor')
CONFIG = qwen.QwenConfig(
  vocab_size=48,
  hidden_size=32,
  intermediate_size=48,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  adapters=lora.Lora(rank=3, alpha=6.0, agents=AGENTS),
  dtype='float32',
  remat='none',
)
EXPERTS = dataclasses.replace(CONFIG, num_experts=4, experts_per_token=2)
CONFIGS = {'dense': CONFIG, 'experts': EXPERTS}
P, C = 8, 4


def _single(config: qwen.QwenConfig) -> qwen.QwenConfig:
  adapters = lora.for_agent(config.adapters)
  return dataclasses.replace(config, adapters=adapters)


def _params(config: qwen.QwenConfig) -> dict:
  adapters, base_params = lora.split(reference.init(config, jax.random.key(0)))
  rng = np.random.default_rng(1)
  adapters = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(0, 0.2, x.shape), jnp.float32), adapters
  )
  return lora.combine(base_params, adapters)


def _rows() -> batch.Rows:
  """Returns rows of two agents, of which some have the same prompt."""
  rng = np.random.default_rng(2)
  prompts = [rng.integers(0, 48, 6), rng.integers(0, 48, 4)]
  choices = [0, 0, 1, 0, 1, 0]
  rows = batch.pack(
    [prompts[n] for n in choices],
    [rng.integers(0, 48, rng.integers(2, C + 1)) for _ in choices],
    max_prompt_tokens=P,
    max_completion_tokens=C,
    row_multiple=8,
  )
  rows.agents[:6] = [0, 1, 1, 0, 0, 1]
  return rows


def _own(rows: batch.Rows, agent: int) -> batch.Rows:
  """Returns the rows of an agent, padded."""
  own = np.flatnonzero(rows.real & (rows.agents == agent))
  padding = np.flatnonzero(~rows.real)
  return rows.take(np.concatenate([own, np.resize(padding, 8 - len(own))]))


def _learner(config: qwen.QwenConfig, *, share=False, **axes):
  axes = {'data': 1, 'fsdp': 1, 'tensor': 1} | axes
  count = int(np.prod(list(axes.values())))
  return learner.Learner(
    config,
    mesh_lib.make_mesh(**axes, devices=jax.devices()[:count]),
    loss=losses.Supervised(),
    optimizer=optax.sgd(1.0),
    minibatch_rows=8,
    microbatch_tokens=48,
    length_buckets=(24,),
    max_completion_tokens=C,
    share_prompts=share,
  )


def _update(config, params, rows, **options):
  """Returns minus the gradient of each adapter, and the loss."""
  subject = _learner(config, **options)
  before = jax.device_get(lora.split(params)[0])
  state, metrics = subject.update(
    subject.init(jax.tree.map(jnp.copy, params)), rows, iteration=0
  )
  after = jax.device_get(state.params)
  return jax.tree.map(np.subtract, after, before), metrics['loss/total']


def _num_tokens(rows: batch.Rows) -> int:
  return int((rows.lengths - rows.prompt_lengths).sum())


def _assert_close(actual, expected, atol=1e-6):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      a, b, rtol=0, atol=atol * max(1.0, float(np.abs(b).max()))
    ),
    actual,
    expected,
  )


@pytest.mark.parametrize('share', [False, True])
@pytest.mark.parametrize('name', ['dense', 'experts'])
@pytest.mark.slow
def test_loss_and_gradients_equal_models_with_one_adapter(name, share):
  config, rows = CONFIGS[name], _rows()
  params = _params(config)
  steps, loss = _update(config, params, rows, share=share)
  steps, total = lora.by_agent(config.adapters, steps), 0.0
  for n, (agent, own_params) in enumerate(
    lora.by_agent(config.adapters, params).items()
  ):
    own = _own(rows, n)
    expected, own_loss = _update(_single(config), own_params, own, share=share)
    # The loss is a mean over the tokens of all agents.
    part = _num_tokens(own) / _num_tokens(rows)
    total += part * own_loss
    expected = jax.tree.map(lambda x, y=part: y * x, expected)
    _assert_close(steps[agent], expected)
    assert min(float(np.abs(x).max()) for x in jax.tree.leaves(expected)) > 0
  np.testing.assert_allclose(loss, total, atol=1e-6)


def _merged_loss(adapters: dict, rest: dict, rows: batch.Rows) -> jax.Array:
  """Returns the mean loss, with each agent's adapter merged; no packing."""
  plain = dataclasses.replace(CONFIG, adapters=None)
  total = 0.0
  for n, own in enumerate(lora.by_agent(CONFIG.adapters, adapters).values()):
    mine = np.flatnonzero(rows.real & (rows.agents == n))
    merged = lora.merge(
      lora.for_agent(CONFIG.adapters), lora.combine(rest, own)
    )
    log_probs, _ = reference.completion_log_probs(
      plain,
      merged,
      jnp.asarray(rows.tokens[mine]),
      jnp.asarray(rows.prompt_lengths[mine]),
      max_completion=C,
    )
    total -= jnp.sum(jnp.where(rows.completion_mask[mine], log_probs, 0))
  return total / _num_tokens(rows)


@pytest.mark.slow
def test_gradients_equal_those_through_merged_matrices():
  rows, params = _rows(), _params(CONFIG)
  steps, loss = _update(CONFIG, params, rows, share=True)
  adapters, rest = lora.split(params)
  expected_loss, grads = jax.jit(
    jax.value_and_grad(lambda x: _merged_loss(x, rest, rows))
  )(adapters)
  np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
  _assert_close(steps, jax.tree.map(lambda x: -x, grads), atol=2e-5)


@pytest.mark.slow
def test_a_mesh_gives_the_update_of_one_device():
  rows, params = _rows(), _params(EXPERTS)
  single, _ = _update(EXPERTS, params, rows)
  sharded, _ = _update(EXPERTS, params, rows, data=2, fsdp=2, tensor=2)
  _assert_close(sharded, single, atol=1e-5)


def test_selected_activations_by_hand():
  # Two adapters of rank 2. The first token is of agent 1, the second of 0.
  low = lora.select(
    lora.Lora(rank=2, agents=AGENTS),
    jnp.array([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]),
    jnp.array([1, 0]),
  )
  np.testing.assert_array_equal(low, [[0, 0, 3, 4], [5, 6, 0, 0]])
  # Without adapters of agents, nothing is computed.
  plain = jnp.ones((2, 2))
  assert lora.select(lora.Lora(rank=2), plain, None) is plain


def test_parameters_of_agents_by_hand():
  # One layer, one input, one output; ranks 0 and 1 are of the planner.
  a, b = jnp.arange(4.0).reshape(1, 1, 4), jnp.arange(4.0).reshape(1, 4, 1)
  params = {'mlp': {'up': 9.0, 'up_a': a, 'up_b': b}, 'value': 5.0}
  own = lora.by_agent(lora.Lora(rank=2, agents=AGENTS), params)
  assert list(own) == ['planner', 'actor']
  np.testing.assert_array_equal(own['actor']['mlp']['up_a'], [[[2, 3]]])
  np.testing.assert_array_equal(own['planner']['mlp']['up_b'], [[[0], [1]]])
  assert own['actor']['mlp']['up'] == 9.0 and own['actor']['value'] == 5.0
  assert lora.by_agent(lora.Lora(rank=2), params) == {'': params}
  assert lora.by_agent(None, params) == {'': params}


def test_packs_by_hand():
  rows = _rows()
  packer = packing.Packer(48, 1, (48,), C, share=True, by_agent=True)
  groups = packer.prompt_groups(rows, np.arange(6))
  # Rows 0 and 1 have the same prompt, but not the same agent.
  assert [group.tolist() for group in groups] == [[0, 3], [1, 5], [2], [4]]
  for microbatch in packer.microbatches(rows, np.arange(6)):
    agents = microbatch.inputs()['agents'].reshape(-1)
    mask = microbatch.mask
    np.testing.assert_array_equal(
      agents[microbatch.before[mask]], rows.agents[microbatch.row[mask]]
    )
  # One adapter for all: agents share prompts.
  together = packing.Packer(48, 1, (48,), C, share=True)
  assert [len(g) for g in together.prompt_groups(rows, np.arange(6))] == [4, 2]
  assert 'agents' not in together.empty(together.shapes[0]).inputs()


def _sampler(
  config: qwen.QwenConfig, weights='adapters', **options
) -> sampler.Sampler:
  return sampler.Sampler(
    config,
    mesh_lib.make_mesh(1, 1, 1, devices=jax.devices()[:1]),
    seed=0,
    prompt_buckets=(8, 16),
    batch_buckets=(4,),
    max_completion_tokens=C,
    stop_ids=(),
    vocab_size=48,
    decode_tokens=2,
    weights=weights,
    truncates=False,
    **options,
  )


def _requests() -> list[sampler.Request]:
  rng = np.random.default_rng(3)
  first = rng.integers(0, 48, 6).astype(np.int32)
  longer = np.concatenate([first, rng.integers(0, 48, 3)]).astype(np.int32)
  return [
    sampler.Request(
      prompt, (0, 0, 0, member, step), conversation=member, agent=agent
    )
    for step, prompt in enumerate((first, longer))
    for member in range(3)
    for agent in (member % 2 if step == 0 else 1,)
  ]


@pytest.mark.parametrize('reuse', ['none', 'prompts', 'all'])
@pytest.mark.slow
def test_samples_equal_those_of_models_with_one_adapter(reuse):
  """Requests with equal prompts, also of one conversation."""
  params, requests = _params(CONFIG), _requests()
  adapters, rest = lora.split(params)
  completions = _sampler(CONFIG, reuse=reuse).generate(adapters, requests, rest)
  parts = list(lora.by_agent(CONFIG.adapters, adapters).values())
  ids = set()
  for n, part in enumerate(parts):
    mine = [i for i, r in enumerate(requests) if r.agent == n]
    alone = _sampler(_single(CONFIG)).generate(
      part, [dataclasses.replace(requests[i], agent=0) for i in mine], rest
    )
    for i, expected in zip(mine, alone, strict=True):
      np.testing.assert_array_equal(completions[i].ids, expected.ids)
      np.testing.assert_allclose(
        completions[i].log_probs, expected.log_probs, atol=1e-5
      )
      ids.add(expected.ids.tobytes())
  assert len(ids) > 2
  rows = batch.pack(
    [r.prompt_ids for r in requests],
    [c.ids for c in completions],
    max_prompt_tokens=12,
    max_completion_tokens=C,
    row_multiple=8,
  )
  rows.agents[: len(requests)] = [r.agent for r in requests]
  subject = _learner(CONFIG, share=True)
  scored = subject.log_probs(subject.init(params).params, rows)
  np.testing.assert_allclose(
    scored[: len(requests)], [c.log_probs for c in completions], atol=1e-5
  )
  # The other adapter would give other log-probs.
  rows.agents[: len(requests)] = [1 - r.agent for r in requests]
  others = subject.log_probs(subject.init(_params(CONFIG)).params, rows)
  assert np.abs(others - scored)[: len(requests)].max(axis=1).min() > 0.01


@pytest.mark.parametrize('weights', ['model', 'int8'])
def test_a_sampler_merges_no_adapters_of_agents(weights):
  with pytest.raises(ValueError, match=f'weights={weights}: one matrix'):
    _sampler(CONFIG, weights)


def _observation(agent: str) -> base.Observation:
  return base.Observation('p', 'p', 'a', 't', agent=agent)


def test_the_runner_chooses_adapters_by_name():
  runner = rollout.EpisodeRunner(None, None, None, 1, 'error', agents=AGENTS)
  assert runner.agent_index(_observation('actor')) == 1
  assert not runner.agent_error(_observation('planner'))
  line = runner.agent_error(_observation('critic'))
  assert line == ("agent 'critic' is not in lora.agents=('planner', 'actor')")
  plain = rollout.EpisodeRunner(None, None, None, 1, 'error')
  assert plain.agent_index(_observation('critic')) == 0
  assert not plain.agent_error(_observation('critic'))


def _config(**fields):
  config = alfworld.get_config('smoke,planner,lora')
  config.lora.agents = AGENTS
  config.update_from_flattened_dict(fields)
  return config


@pytest.mark.parametrize(
  ('fields', 'line'),
  [
    (
      {'rollout.weights': 'model'},
      'rollout.weights=model: one matrix cannot hold the adapters of '
      "lora.agents=('planner', 'actor'); must be adapters",
    ),
    (
      {'lora.agents': ('planner', 'critic')},
      "lora.agents=('planner', 'critic'): the agents of env.name="
      "envs.alfworld.planner are ('planner', 'actor'); must be these",
    ),
    (
      {'env.name': 'alfworld'},
      "lora.agents=('planner', 'actor'): the agents of env.name=alfworld are "
      '(); must be ()',
    ),
    (
      {'teacher.mu_peak': 0.5},
      'teacher.mu_peak=0.5: the rows of the teacher name no agent of '
      "lora.agents=('planner', 'actor'); must be 0",
    ),
    ({'lora.agents': ('planner',)}, 'must be two or more different names'),
    ({'lora.agents': ('a/b', 'actor')}, 'must be two or more different names'),
    (
      {'lora.rank': 0},
      "lora.agents=('planner', 'actor'): has no effect; needs lora.rank to be "
      'above 0, or must be ()',
    ),
  ],
  ids=lambda x: next(iter(x)) if isinstance(x, dict) else '',
)
def test_senseless_combinations_are_refused(fields, line):
  config = _config(**fields)
  with pytest.raises(ValueError) as error:
    config_lib.validate(config, needs_model=False)
  assert line in str(error.value)


def test_a_valid_config_and_a_warm_start(tmp_path):
  config = _config()
  config_lib.validate(config, needs_model=False)
  config.sft.init = 'scratch'
  with pytest.raises(ValueError, match='name no agent; must be'):
    sft.warm_start(config, str(tmp_path))


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore::FutureWarning')
def test_peft_loads_the_adapter_of_each_agent(tmp_path):
  torch = pytest.importorskip('torch', reason='parity needs PyTorch')
  peft = pytest.importorskip('peft', reason='parity needs PEFT')
  import transformers

  config = dataclasses.replace(CONFIG, qkv_bias=True)
  params = _params(config)
  adapters, rest = lora.split(params)
  plain = dataclasses.replace(config, adapters=None)
  huggingface.save(str(tmp_path / 'base'), plain, rest, dtype='float32')
  tokens = np.random.default_rng(0).integers(0, 48, (2, 7))
  outputs = []
  for n, (agent, own) in enumerate(
    lora.by_agent(config.adapters, adapters).items()
  ):
    folder = str(tmp_path / agent)
    huggingface.save_adapters(
      folder, _single(config), own, str(tmp_path / 'base')
    )
    model = peft.PeftModel.from_pretrained(
      transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / 'base', dtype='float32'
      ),
      folder,
    )
    with torch.no_grad():
      logits = model(torch.tensor(tokens)).logits.numpy()
    hidden = reference.hidden_states(
      config, params, tokens, agents_BL=np.full(tokens.shape, n)
    )
    expected = np.asarray(reference.logits(config, params, hidden))
    scale = np.abs(expected).max()
    np.testing.assert_allclose(logits, expected, atol=2e-5 * scale)
    outputs.append(logits)
  assert np.abs(outputs[0] - outputs[1]).max() > 0.1
