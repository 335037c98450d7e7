"""Measure how int8 weights and an int8 cache move a policy's log-probs.

    python benchmarks/int8.py

Samples responses of the included policy for ALFWorld and computes their
log-probs as the learner does. The table has the metrics `sampler/...` of
training: differences of tokens, and ratios of responses, learner to sampler.
"""

import argparse
import dataclasses

import jax
import numpy as np

import envs
from configs import alfworld
from envs import base
from gigpo_jax import config as config_lib
from gigpo_jax import mesh, sampler
from gigpo_jax.models import huggingface, qwen
from gigpo_jax.tokenizer import Tokenizer

_PATH = 'configs/warm_starts/alfworld_tiny'
_TASKS, _STEPS, _MEMBERS, _SEEDS = 8, 4, 1, (0, 1, 2)
_PROMPT, _RESPONSE = 512, 64


def prompts(text: Tokenizer) -> list[np.ndarray]:
  """Returns the prompts of the first steps of some tasks."""
  config = alfworld.get_config('tiny')
  config_lib.validate(config)
  env, texts = envs.make('alfworld', **config_lib.env_kwargs(config)), []
  for index in range(_TASKS):
    observation = env.reset(base.Task('train', index))
    for step in range(_STEPS):
      texts.append(observation.prompt)
      action = observation.actions[step % len(observation.actions)]
      observation = env.step(
        f'<think>I look.</think><action>{action}</action>'
      ).observation
  return [ids[-_PROMPT:].astype(np.int32) for ids in text.render(texts)]


def log_probs(model: qwen.QwenConfig, params: dict, rows: list) -> list:
  """Returns the learner's log-probs of (prompt, completion) pairs."""
  length = _PROMPT + _RESPONSE
  tokens = np.zeros((len(rows), length), np.int32)
  for n, (prompt, ids) in enumerate(rows):
    tokens[n, : len(prompt) + len(ids)] = [*prompt, *ids]

  @jax.jit
  def run(tokens_BL: jax.Array) -> jax.Array:
    hidden_BLD = qwen.hidden_states(model, params, tokens_BL)
    return qwen.token_log_probs(
      model, params, hidden_BLD[:, :-1], tokens_BL[:, 1:]
    )[0]

  batches = [run(tokens[n : n + 16]) for n in range(0, len(rows), 16)]
  all_BL = np.concatenate([np.asarray(batch) for batch in batches])
  return [
    all_BL[n, len(prompt) - 1 : len(prompt) - 1 + len(ids)]
    for n, (prompt, ids) in enumerate(rows)
  ]


def main() -> None:
  """Prints a row for each choice of types and each seed."""
  argparse.ArgumentParser(description=__doc__).parse_args()
  text, devices = Tokenizer(_PATH), mesh.make_mesh(1, -1, 1)
  inputs = prompts(text)
  print(
    '| compute | weights | cache | seed | tokens | token, mean and max', end=''
  )
  print(' | response ratio, mean and max |\n|---|---|---|---|---|---|---|')
  for dtype, weights, cache in (
    ('float32', 'model', 'model'),
    ('float32', 'model', 'int8'),
    ('float32', 'int8', 'model'),
    ('bfloat16', 'model', 'model'),
    ('bfloat16', 'model', 'int8'),
    ('bfloat16', 'int8', 'int8'),
  ):
    model = huggingface.read_config(_PATH, dtype=dtype, remat='none')
    params = huggingface.load(_PATH, model, devices)
    engine = sampler.Sampler(
      dataclasses.replace(model, cache=cache),
      devices,
      seed=0,
      prompt_buckets=(_PROMPT,),
      batch_buckets=(32,),
      max_completion_tokens=_RESPONSE,
      stop_ids=text.stop_ids,
      vocab_size=text.vocab_size,
      weights=weights,
    )
    for seed in _SEEDS:
      requests = [
        sampler.Request(ids, (seed, 0, n, member, 0))
        for n, ids in enumerate(inputs)
        for member in range(_MEMBERS)
      ]
      completions = engine.generate(params, requests)
      rows = [
        (request.prompt_ids, completion.ids)
        for request, completion in zip(requests, completions, strict=True)
      ]
      learned = log_probs(model, params, rows)
      differences = [
        a - b.log_probs for a, b in zip(learned, completions, strict=True)
      ]
      tokens = np.abs(np.concatenate(differences))
      ratios = np.exp([difference.sum() for difference in differences])
      print(
        f'| {dtype} | {weights} | {cache} | {seed} | {len(tokens):,} '
        f'| {tokens.mean():.1e}, {tokens.max():.1e} '
        f'| {ratios.mean():.4f}, {ratios.max():.3f} |',
        flush=True,
      )


if __name__ == '__main__':
  main()
