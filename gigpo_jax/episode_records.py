"""Records of episodes in RLDS format: fields, encoding and decoding.

A record is a plain dictionary of one episode, with a list of its steps. Its
serialized form is a tf.train.Example in the layout of tfds; TensorFlow is not
needed.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.proto import tf_example_pb2, tf_feature_pb2

# Only for type annotations: the viewer starts without importing jax.
if TYPE_CHECKING:
  from gigpo_jax import algorithms, batch, trajectory

# Fields of an episode and of a step, with one value each.
_EPISODE = {
  'iteration': np.int64,
  'group': np.int64,
  'member': np.int64,
  'task_split': str,
  'task_index': np.int64,
  'kind': str,
  'success': np.bool_,
  'return': np.float32,
  'score': np.float32,
  'failure': str,
  'trained': np.bool_,
  'seed': np.int64,
}
_STEP = {
  'observation': str,
  'action': str,
  'reward': np.float32,
  'team_reward': np.float32,
  'discount': np.float32,
  'is_first': np.bool_,
  'is_last': np.bool_,
  'is_terminal': np.bool_,
  'response': str,
  'valid': np.bool_,
  'truncated': np.bool_,
  'prompt_shortened': np.bool_,
  'anchor': str,
  'agent': str,
  'anchor_group': np.int64,
  'discounted_return': np.float32,
  'episode_advantage': np.float32,
  'step_advantage': np.float32,
  'advantage': np.float32,
}
# Fields of a step with a value per token.
_TOKENS = {
  'prompt_ids': np.int32,
  'completion_ids': np.int32,
  'log_probs': np.float32,
}

# Group of the rows of a teacher, which have no group.
TEACHER = -1

# Values of a step for which the algorithm returned no advantages.
_NO_ADVANTAGES = {
  'anchor_group': -1,
  'discounted_return': math.nan,
  'episode_advantage': math.nan,
  'step_advantage': math.nan,
  'advantage': math.nan,
}


def features() -> tfds.features.FeaturesDict:
  """Returns the fields of a record as tfds features."""

  def feature(dtype: type):
    return tfds.features.Text() if dtype is str else dtype

  steps = {name: feature(dtype) for name, dtype in _STEP.items()}
  steps |= {
    name: tfds.features.Sequence(dtype) for name, dtype in _TOKENS.items()
  }
  return tfds.features.FeaturesDict(
    {name: feature(dtype) for name, dtype in _EPISODE.items()}
    | {'steps': tfds.features.Dataset(steps)}
  )


def make_record(
  episode: 'trajectory.Trajectory',
  *,
  iteration: int,
  seed: int,
  step_fields: dict[int, dict[str, float]] | None,
) -> dict[str, Any]:
  """Returns an episode as a record.

  Args:
    episode: the episode.
    iteration: iteration in which it was played.
    seed: seed of the run.
    step_fields: fields by step index, from `make_step_fields`; None if the
      episode was not trained on.
  """
  last, agents = len(episode.steps), episode.agents
  rewards, team_rewards = episode.own_rewards, episode.team_rewards
  done = last > 0 and episode.steps[-1].result.done and not episode.failure
  steps = [
    {
      'observation': step.observation,
      'action': step.result.action,
      'reward': rewards[index],
      'team_reward': team_rewards[index],
      'discount': 0.0 if done and index == last - 1 else 1.0,
      'response': step.response,
      'valid': step.result.valid,
      'truncated': step.truncated,
      'prompt_shortened': step.prompt_shortened,
      'anchor': step.anchor,
      'agent': agents[index],
      'prompt_ids': step.prompt_ids,
      'completion_ids': step.completion_ids,
      'log_probs': step.log_probs,
      **_NO_ADVANTAGES,
      **(step_fields or {}).get(index, {}),
    }
    for index, step in enumerate(episode.steps)
  ]
  steps.append(_closing_step(*(episode.end or ('', '')), done))
  for index, step in enumerate(steps):
    step['is_first'], step['is_last'] = index == 0, index == last
    step['is_terminal'] = done and index == last
  return {
    'iteration': iteration,
    'group': episode.group,
    'member': episode.member,
    'task_split': episode.task.split,
    'task_index': episode.task.index,
    'kind': episode.task_type,
    'success': episode.success,
    'return': math.fsum(rewards),
    'score': math.nan if episode.score is None else episode.score,
    'failure': episode.failure,
    'trained': step_fields is not None,
    'seed': seed,
    'steps': steps,
  }


def make_teacher_records(
  rows: 'batch.Rows',
  columns: Mapping[str, np.ndarray],
  responses: Sequence[str],
  *,
  iteration: int,
  seed: int,
) -> list[dict[str, Any]]:
  """Returns the rows of a teacher as records of one step each.

  Log-probs and advantages are NaN for a teacher without them.

  Args:
    rows: the rows.
    columns: columns that the teacher's loss reads, [R] or [R, C].
    responses: text of each real row's response.
    iteration: iteration in which the rows are trained on.
    seed: seed of the run.
  """
  unknown = np.full(rows.completion_mask.shape, math.nan, np.float32)
  log_probs = columns.get('old_log_probs', unknown)
  advantages = _row_means(
    columns.get('advantages', unknown), rows.completion_mask
  )
  records = []
  for member, r in enumerate(np.flatnonzero(rows.real)):
    start, end = rows.prompt_lengths[r], rows.lengths[r]
    closing = _closing_step('', '', done=True)
    step = closing | {
      'response': responses[member],
      'valid': True,
      'discount': 1.0,
      'is_first': True,
      'prompt_ids': rows.tokens[r, :start],
      'completion_ids': rows.tokens[r, start:end],
      'log_probs': log_probs[r, : end - start],
      'advantage': float(advantages[r]),
    }
    neutral = {name: dtype() for name, dtype in _EPISODE.items()}
    own = {'iteration': iteration, 'group': TEACHER, 'member': member}
    own |= {'kind': 'teacher', 'trained': True, 'seed': seed}
    steps = [step, closing | {'is_last': True}]
    records.append(neutral | own | {'steps': steps})
  return records


def _row_means(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
  """Returns values [R], or the means over the tokens of values [R, C]."""
  if values.ndim == 1:
    return values
  counts = np.maximum(mask.sum(axis=1), 1)
  return np.where(mask, values, 0).sum(axis=1) / counts


def _closing_step(observation: str, anchor: str, done: bool) -> dict[str, Any]:
  """Returns the last step, which holds only the final observation."""
  empty = {name: np.zeros(0, dtype) for name, dtype in _TOKENS.items()}
  neutral = {name: dtype() for name, dtype in _STEP.items()}
  final = {
    'observation': observation,
    'anchor': anchor,
    'discount': float(not done),
  }
  return neutral | empty | _NO_ADVANTAGES | final


def make_step_fields(
  rows: 'batch.Rows', output: 'algorithms.AlgorithmOutput'
) -> dict[int, dict[int, dict[str, float]]]:
  """Returns advantages by episode index, then step index.

  If the algorithm gives each token its own advantage, the step's value is their
  mean.

  Args:
    rows: rows of an iteration that are trained on; others are padding.
    output: output of the algorithm for the rows.
  """
  advantages = _row_means(output.advantages, rows.completion_mask)
  columns = {'anchor_group': rows.anchors, 'advantage': advantages}
  if output.components is not None:
    columns |= {
      'discounted_return': output.components.returns,
      'episode_advantage': output.components.episode_advantage,
      'step_advantage': output.components.step_advantage,
    }
  by_episode: dict[int, dict[int, dict[str, float]]] = {}
  for r in np.flatnonzero(rows.real):
    steps = by_episode.setdefault(int(rows.episodes[r]), {})
    steps[int(rows.steps[r])] = {k: v[r].item() for k, v in columns.items()}
  return by_episode


def encode(episode: dict[str, Any]) -> bytes:
  """Returns a record as a serialized tf.train.Example in tfds layout."""
  features = {
    name: _feature([episode[name]], dtype) for name, dtype in _EPISODE.items()
  }
  steps = episode['steps']
  for name, dtype in _STEP.items():
    features[f'steps/{name}'] = _feature([step[name] for step in steps], dtype)
  for name, dtype in _TOKENS.items():
    values = [np.asarray(step[name], dtype) for step in steps]
    flat, lengths = _ragged(name)
    features[flat] = _feature(np.concatenate(values), dtype)
    features[lengths] = _feature([len(v) for v in values], np.int64)
  return tf_example_pb2.Example(
    features=tf_feature_pb2.Features(feature=features)
  ).SerializeToString(deterministic=True)


def decode(data: bytes, *, tokens: bool = True) -> dict[str, Any]:
  """Returns the record that `encode` serialized.

  Args:
    data: the serialized record.
    tokens: whether to decode per-token fields; without them decoding is fast.
  """
  features = tf_example_pb2.Example.FromString(data).features.feature
  episode = {
    name: _values(features[name], dtype)[0] for name, dtype in _EPISODE.items()
  }
  columns = {
    name: _values(features[f'steps/{name}'], dtype)
    for name, dtype in _STEP.items()
  }
  # Sets of earlier releases have no agents.
  columns['agent'] = columns['agent'] or [''] * len(columns['anchor'])
  if not len(columns['team_reward']):  # Nor the rewards of a team.
    columns['team_reward'] = columns['reward']
  for name, dtype in _TOKENS.items() if tokens else ():
    flat, lengths = _ragged(name)
    ends = np.cumsum(_values(features[lengths], np.int64))
    columns[name] = np.split(_values(features[flat], dtype), ends[:-1])
  steps = [
    dict(zip(columns, values, strict=True))
    for values in zip(*columns.values(), strict=True)
  ]
  return episode | {'steps': steps}


def decode_group(data: bytes) -> int:
  """Returns the group of a serialized record; cheaper than `decode`."""
  features = tf_example_pb2.Example.FromString(data).features.feature
  return int(features['group'].int64_list.value[0])


def _ragged(name: str) -> tuple[str, str]:
  return (
    f'steps/{name}/ragged_flat_values',
    f'steps/{name}/ragged_row_lengths_0',
  )


def _feature(values: Sequence, dtype: type) -> tf_feature_pb2.Feature:
  if dtype is str:
    # Lone surrogates have no UTF-8 encoding; write them as escapes.
    texts = [value.encode(errors='backslashreplace') for value in values]
    return tf_feature_pb2.Feature(
      bytes_list=tf_feature_pb2.BytesList(value=texts)
    )
  # protobuf copies a list four times as fast as an array.
  if dtype is np.float32:
    numbers = np.asarray(values, dtype).tolist()
    return tf_feature_pb2.Feature(
      float_list=tf_feature_pb2.FloatList(value=numbers)
    )
  numbers = np.asarray(values, np.int64).tolist()
  return tf_feature_pb2.Feature(
    int64_list=tf_feature_pb2.Int64List(value=numbers)
  )


def _values(feature: tf_feature_pb2.Feature, dtype: type) -> Sequence:
  if dtype is str:
    return [text.decode() for text in feature.bytes_list.value]
  if dtype is np.float32:
    return np.array(feature.float_list.value, dtype)
  return np.array(feature.int64_list.value, np.int64).astype(dtype)
