"""Train GiGPO in your own loop, without config or work directory.

    python examples/own_loop.py

The loop makes the same calls as `gigpo_jax.train`, with plain arguments.
"""

import pathlib

import configs
import gigpo_jax
from envs import base

START = pathlib.Path(configs.__file__).parent / 'warm_starts' / 'alfworld_tiny'
GROUPS, MEMBERS, MAX_STEPS = 4, 4, 8
PROMPT_TOKENS, COMPLETION_TOKENS = 320, 40
HOUSEHOLD = {
  'engine': 'native',
  'generator': {'seed': 0, 'receptacles': (4, 6), 'distractors': (2, 5)},
  'max_steps': MAX_STEPS,
  'prompt_style': 'brief',
}


def make_pool() -> 'gigpo_jax.env_pool.EnvPool':
  """Returns the environments; starts a worker process."""
  return gigpo_jax.env_pool.EnvPool(
    'alfworld',
    HOUSEHOLD,
    num_envs=GROUPS * MEMBERS,
    num_workers=1,
    step_timeout_secs=60,
    reset_timeout_secs=60,
    envs_per_group=MEMBERS,
  )


def make_sampler(shape, devices, text) -> 'gigpo_jax.sampler.Sampler':
  """Returns the sampler of a model on devices."""
  return gigpo_jax.sampler.Sampler(
    shape,
    devices,
    seed=0,
    prompt_buckets=(PROMPT_TOKENS,),
    batch_buckets=(GROUPS * MEMBERS,),
    max_completion_tokens=COMPLETION_TOKENS,
    stop_ids=text.stop_ids,
    vocab_size=text.vocab_size,
  )


def make_learner(shape, devices) -> 'gigpo_jax.learner.Learner':
  """Returns the learner of a model on devices."""
  return gigpo_jax.learner.Learner(
    shape,
    devices,
    loss=gigpo_jax.losses.PolicyGradient(kl_weight=0.0),
    optimizer=gigpo_jax.optimizer.AdamW(learning_rate=4e-4).make(),
    minibatch_rows=256,
    microbatch_tokens=8 * (PROMPT_TOKENS + COMPLETION_TOKENS),
    length_buckets=(PROMPT_TOKENS + COMPLETION_TOKENS,),
    max_completion_tokens=COMPLETION_TOKENS,
    temperature=1.0,
    aggregation='token_mean',
    seed=0,
  )


def main(num_iterations: int = 2) -> list[dict[str, float]]:
  """Trains for a few iterations; returns the metrics of each."""
  # Worker processes import this file too and must not import jax.
  import jax

  from gigpo_jax.models import huggingface

  devices = gigpo_jax.mesh.make_mesh(data=1, fsdp=-1, tensor=1)
  shape = huggingface.read_config(str(START), dtype='float32', remat='none')
  text = gigpo_jax.tokenizer.Tokenizer(str(START))
  learner = make_learner(shape, devices)
  algorithm = gigpo_jax.algorithms.make('gigpo')
  history = []
  with jax.set_mesh(devices), make_pool() as pool:
    runner = gigpo_jax.rollout.EpisodeRunner(
      pool=pool,
      sampler=make_sampler(shape, devices, text),
      tokenizer=text,
      max_prompt_tokens=PROMPT_TOKENS,
      prompt_overflow='drop_history',
    )
    state = learner.init(huggingface.load(str(START), shape, devices))
    for iteration in range(num_iterations):
      first = iteration * GROUPS
      episodes = runner.run(
        state.params,
        [base.Task('train', first + group) for group in range(GROUPS)],
        episodes_per_group=MEMBERS,
        stream=(gigpo_jax.rollout.TRAIN, iteration),
        sampling=gigpo_jax.sampler.Sampling(temperature=1.0),
      )
      rows = gigpo_jax.batch.from_trajectories(
        episodes,
        max_prompt_tokens=PROMPT_TOKENS,
        max_completion_tokens=COMPLETION_TOKENS,
      )
      output = algorithm.compute_advantages(rows)
      state, metrics = learner.update(
        state,
        rows,
        iteration=iteration,
        advantages=output.advantages,
        old_log_probs=learner.log_probs(state.params, rows),
        importance=1.0,
      )
      success = sum(e.success for e in episodes) / len(episodes)
      history.append(metrics | {'success': success})
      print(
        f'iteration {iteration}: success {success:.0%}, '
        f'loss {metrics["loss/total"]:+.4f}'
      )
  return history


if __name__ == '__main__':
  main()
