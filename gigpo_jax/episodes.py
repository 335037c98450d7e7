"""Store episodes as a data set in RLDS format, and read them back.

`tfds.builder_from_directory` reads the set without this module and without
TensorFlow. Input: episodes and the advantages of their steps. Output: one
record, a plain dictionary, per episode. `launch/sft.py` trains on the records
and `viewer` shows them. This module uses no device.

Each file holds one iteration. It and the index files are written to a temporary
file and renamed, so a set can be read while it grows and after a kill.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow_datasets as tfds
from array_record.python import array_record_module
from tensorflow_datasets.proto import tf_example_pb2, tf_feature_pb2

from gigpo_jax.runtime import files

# Only for type annotations: the viewer starts without importing jax.
if TYPE_CHECKING:
  from gigpo_jax import algorithms, batch, group_filter, tokenizer, trajectory

FOLDER = 'episodes'  # Folder in a work directory.
INFO = 'dataset_info.json'
_SPLIT = 'train'

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
  'discount': np.float32,
  'is_first': np.bool_,
  'is_last': np.bool_,
  'is_terminal': np.bool_,
  'response': str,
  'valid': np.bool_,
  'truncated': np.bool_,
  'prompt_shortened': np.bool_,
  'anchor': str,
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

# Values of a step for which the algorithm has none.
_NO_ADVANTAGES = {
  'anchor_group': -1,
  'discounted_return': math.nan,
  'episode_advantage': math.nan,
  'step_advantage': math.nan,
  'advantage': math.nan,
}

_DESCRIPTION = """\
Training episodes of a language-model policy, in RLDS format. The last step of
an episode (is_last) holds only the final state. discount is 0 if the
environment ended the episode, also by its own step limit. iteration, group and
member identify an episode; episodes of a group share a task. trained: whether
the episode was trained on. return: sum of rewards. Fields of steps: anchor is
the state in which the step was taken, and anchor_group the id of that state in
the iteration (-1: not trained on). discounted_return, episode_advantage,
step_advantage and advantage come from the algorithm; NaN means not available.
prompt_ids, completion_ids and log_probs are the sampler's inputs and outputs;
tokenizer/ holds the tokenizer.
"""


def record(
  episode: 'trajectory.Trajectory',
  *,
  iteration: int,
  seed: int,
  told: dict[int, dict[str, float]] | None,
) -> dict[str, Any]:
  """Returns an episode as a record.

  Args:
    episode: the episode.
    iteration: iteration in which it was played.
    seed: seed of the run.
    told: values from `tell` by step index; None if the episode was not trained
      on.
  """
  last = len(episode.steps)
  done = last > 0 and episode.steps[-1].result.done and not episode.failure
  steps = [
    {
      'observation': step.observation,
      'action': step.result.action,
      'reward': step.result.reward,
      'discount': 0.0 if done and index == last - 1 else 1.0,
      'response': step.response,
      'valid': step.result.valid,
      'truncated': step.truncated,
      'prompt_shortened': step.prompt_shortened,
      'anchor': step.anchor,
      'prompt_ids': step.prompt_ids,
      'completion_ids': step.completion_ids,
      'log_probs': step.log_probs,
      **_NO_ADVANTAGES,
      **(told or {}).get(index, {}),
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
    'return': episode.reward,
    'score': math.nan if episode.score is None else episode.score,
    'failure': episode.failure,
    'trained': told is not None,
    'seed': seed,
    'steps': steps,
  }


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


def step_fields(
  rows: 'batch.Rows', credit: 'algorithms.Credit'
) -> dict[int, dict[int, dict[str, float]]]:
  """Returns advantages by episode index, then step index.

  If the algorithm gives each token its own advantage, the step's value is their
  mean.

  Args:
    rows: rows of an iteration.
    credit: what the algorithm computed for the rows.
  """
  advantages = credit.advantages
  if advantages.ndim > 1:
    mask = rows.completion_mask
    counts = np.maximum(mask.sum(axis=1), 1)
    advantages = np.where(mask, advantages, 0).sum(axis=1) / counts
  columns = {'anchor_group': rows.anchors, 'advantage': advantages}
  if credit.parts is not None:
    columns |= {
      'discounted_return': credit.parts.returns,
      'episode_advantage': credit.parts.episode_advantage,
      'step_advantage': credit.parts.step_advantage,
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
  for name, dtype in _TOKENS.items() if tokens else ():
    flat, lengths = _ragged(name)
    ends = np.cumsum(_values(features[lengths], np.int64))
    columns[name] = np.split(_values(features[flat], dtype), ends[:-1])
  steps = [
    dict(zip(columns, values, strict=True))
    for values in zip(*columns.values(), strict=True)
  ]
  return episode | {'steps': steps}


def _group(data: bytes) -> int:
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
  # protobuf copies lists four times as fast as arrays.
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


class EpisodeWriter:
  """Writes the episodes of a run to a data set, one iteration at a time.

  Args:
    directory: folder of the set.
    text: the tokenizer; the set keeps a copy.
    seed: seed of the run.
    every: write every so many iterations.
    first_iteration: iteration at which the run starts or resumes. Stored
      iterations from there on are dropped, so that each is stored once.
    most_repeated: maximum number of dropped iterations that a kill can explain.
      If there are more, or files that the index does not list, the folder is
      renamed to episodes.bak. None: no limit.
  """

  def __init__(
    self,
    directory: str | pathlib.Path,
    text: 'tokenizer.Tokenizer',
    *,
    seed: int,
    every: int = 1,
    first_iteration: int = 0,
    most_repeated: int | None = None,
  ):
    self._directory = pathlib.Path(directory)
    self._seed, self._every = seed, every
    self._metadata = {
      'version': files.VERSION,
      'tokenizer': text.fingerprint,
      'seed': seed,
    }
    self._shards: list[tuple[int, int]] = []
    shards, problem = _shards_before(
      self._directory, text, first_iteration, most_repeated
    )
    if problem:
      backup = files.free_name(self._directory)
      self._directory.rename(backup)
      print(
        f'{self._directory}: {problem}; the folder is kept as {backup.name}',
        flush=True,
      )
    else:
      self._shards = shards
    self._directory.mkdir(parents=True, exist_ok=True)
    with files.as_os_errors(self._directory):
      text.save(str(self._directory / 'tokenizer'))
    self._list_shards()
    listed = {_path(self._directory, n).name for n in range(len(self._shards))}
    for path in self._directory.glob('episodes-*'):
      if path.name not in listed:
        path.unlink()

  def write(
    self,
    iteration: int,
    collected: 'group_filter.CollectedGroups',
    rows: 'batch.Rows | None' = None,
    credit: 'algorithms.AlgorithmOutput | None' = None,
  ) -> dict[str, float]:
    """Writes an iteration if it is due; it is on disk on return.

    Args:
      iteration: index of the iteration.
      collected: its episodes.
      rows: rows of `collected.kept`; None if there are none.
      credit: advantages of the rows.

    Returns:
      The time it took as a metric; empty if the iteration is not due.
    """
    if iteration % self._every:
      return {}
    start = time.monotonic()
    by_episode = {} if rows is None else step_fields(rows, credit)
    trained = {
      position: by_episode.get(index, {})
      for index, position in enumerate(collected.indices)
      if not collected.episodes[position].failure
    }
    self.append(
      iteration,
      [
        record(
          t, iteration=iteration, seed=self._seed, told=trained.get(position)
        )
        for position, t in enumerate(collected.episodes)
      ],
    )
    return {'time/episodes_secs': time.monotonic() - start}

  def append(self, iteration: int, records: Sequence[dict[str, Any]]) -> None:
    """Appends the records of an iteration as a new file."""
    path = _path(self._directory, len(self._shards))
    temporary = path.with_name(path.name + '.tmp')
    with files.as_os_errors(path):
      writer = array_record_module.ArrayRecordWriter(
        str(temporary), 'group_size:1'
      )
      for record in records:
        writer.write(encode(record))
      writer.close()
    files.rename_synced(temporary, path)
    self._shards.append((iteration, len(records)))
    self._list_shards()

  def _list_shards(self) -> None:
    """Writes the index files that tfds needs."""
    paths = [_path(self._directory, n) for n in range(len(self._shards))]
    info = tfds.core.DatasetInfo(
      builder=tfds.core.DatasetIdentity(
        name='episodes',
        version=tfds.core.Version('1.0.0'),
        data_dir=str(self._directory),
        module_name='',
      ),
      description=_DESCRIPTION,
      features=_features(),
      metadata=tfds.core.MetadataDict(
        self._metadata, iterations=[n for n, _ in self._shards]
      ),
    )
    info.set_file_format(tfds.core.FileFormat.ARRAY_RECORD)
    split = tfds.core.SplitInfo(
      name=_SPLIT,
      shard_lengths=[length for _, length in self._shards],
      num_bytes=sum(path.stat().st_size for path in paths),
      filename_template=_template(self._directory),
    )
    info.set_splits(tfds.core.SplitDict([split]))
    temporary = self._directory / 'info.tmp'
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    info.write_to_directory(str(temporary))
    # A kill between the renames leaves metadata.json with one iteration more
    # than the index; `open_set` accepts that.
    for name in ('features.json', 'metadata.json', INFO):
      files.rename_synced(temporary / name, self._directory / name)
    temporary.rmdir()


def _shards_before(
  directory: pathlib.Path,
  text: 'tokenizer.Tokenizer',
  first_iteration: int,
  most_repeated: int | None,
) -> tuple[list[tuple[int, int]], str]:
  """Returns the shards before an iteration, and why they are unusable.

  The reason is empty if the log can continue the set.
  """
  paths = set(directory.glob(f'{FOLDER}-*.array_record-*'))
  paths = {path for path in paths if path.suffix != '.tmp'}
  if not (directory / INFO).exists():
    return [], f'has {len(paths)} files but no {INFO}' if paths else ''
  stored = open_dataset(directory)
  if stored.fingerprint != text.fingerprint:
    return [], 'its tokens are from another tokenizer'
  # After a kill, the index may lack the newest file.
  expected = {_path(directory, n) for n in range(len(stored.shards) + 1)}
  if unknown := sorted(path.name for path in paths - expected):
    return [], f'{INFO} does not list {unknown[0]}'
  repeated = [n for n, _ in stored.shards if n >= first_iteration]
  if most_repeated is not None and len(repeated) > most_repeated:
    return [], (
      f'has {len(repeated)} iterations from {first_iteration} on, '
      'but no checkpoint of them'
    )
  return [s for s in stored.shards if s[0] < first_iteration], ''


def _features() -> tfds.features.FeaturesDict:
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


@dataclasses.dataclass(frozen=True)
class EpisodeDataset:
  """A data set of episodes on disk.

  Attributes:
    directory: folder of the set.
    shards: (iteration, number of episodes) of each file.
    fingerprint: fingerprint of the tokenizer.
    source: the serialized records, in order.
  """

  directory: pathlib.Path
  shards: list[tuple[int, int]]
  fingerprint: str
  source: Sequence[bytes]

  @property
  def iterations(self) -> list[int]:
    """Iterations in the set."""
    return [iteration for iteration, _ in self.shards]

  def read(
    self, iteration: int, group: int | None = None, *, tokens: bool = True
  ) -> list[dict[str, Any]]:
    """Returns the records of an iteration, or of one of its groups.

    Args:
      iteration: index of the iteration.
      group: index of the group; None: all groups.
      tokens: whether to decode per-token fields.

    Raises:
      KeyError: if the iteration or group is not in the set.
      ValueError: in one line, if a record is damaged.
    """
    positions = self._positions(iteration)
    if group is not None:
      positions = [n for n in positions if self._decode_at(n, _group) == group]
    if not positions:
      raise KeyError(group)
    read = functools.partial(decode, tokens=tokens)
    return [self._decode_at(position, read) for position in positions]

  def groups(
    self, iteration: int, *, tokens: bool = True
  ) -> Iterator[list[dict[str, Any]]]:
    """Yields the records of each group of an iteration, in order.

    Reads each record twice, whatever the number of groups.

    Args:
      iteration: index of the iteration.
      tokens: whether to decode per-token fields.

    Raises:
      KeyError: if the iteration is not in the set.
      ValueError: in one line, if a record is damaged.
    """
    groups: dict[int, list[int]] = {}
    for position in self._positions(iteration):
      groups.setdefault(self._decode_at(position, _group), []).append(position)
    read = functools.partial(decode, tokens=tokens)
    for _, positions in sorted(groups.items()):
      yield [self._decode_at(position, read) for position in positions]

  def __iter__(self) -> Iterator[dict[str, Any]]:
    """Yields all records."""
    count = sum(length for _, length in self.shards)
    return (self._decode_at(position, decode) for position in range(count))

  def _positions(self, iteration: int) -> Sequence[int]:
    """Returns the positions of an iteration's records in `source`."""
    if iteration not in self.iterations:
      raise KeyError(iteration)
    shard = self.iterations.index(iteration)
    start = sum(length for _, length in self.shards[:shard])
    return range(start, start + self.shards[shard][1])

  def _decode_at(self, position: int, read: Callable[[bytes], Any]) -> Any:
    """Returns `read` applied to the record at a position in `source`."""
    try:
      return read(self.source[position])
    except Exception as error:  # ArrayRecord, protobuf, numpy or UTF-8.
      reason = ' '.join(str(error).split())[:200]
      shard, first = 0, 0
      while position >= first + self.shards[shard][1]:
        first += self.shards[shard][1]
        shard += 1
      name = _path(self.directory, shard).name
      raise ValueError(
        f'{self.directory}/{name}: record {position - first} is damaged '
        f'({reason or type(error).__name__}); restore the file, or delete the '
        'episodes folder to drop its episodes'
      ) from error


def _path(directory: pathlib.Path, shard: int) -> pathlib.Path:
  template = _template(directory)
  return pathlib.Path(
    template.sharded_filepath(shard_index=shard, num_shards=None)
  )


def _template(directory: pathlib.Path) -> tfds.core.ShardedFileTemplate:
  return tfds.core.ShardedFileTemplate(
    directory,
    # The shard count is not part of the name, because it would rename all files
    # with each new one.
    template='{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}',
    dataset_name='episodes',
    split=_SPLIT,
    filetype_suffix='array_record',
  )


def check_folder(directory: pathlib.Path) -> None:
  """Checks that a `Log` can continue the set in a folder.

  Raises:
    ValueError: in one line, if it cannot.
  """
  if not (directory / INFO).exists():
    return
  remedy = 'move the folder away to start a new set'
  try:
    episode_set = open_dataset(directory)
  except ValueError as error:
    raise ValueError(f'{error}; {remedy}') from error
  for index, (_, length) in enumerate(episode_set.shards):
    path = _path(directory, index)
    if reason := _damage(path, length):
      raise ValueError(f'{path}: {reason}; {remedy}')


def _damage(path: pathlib.Path, length: int) -> str:
  """Returns what is wrong with a shard; '' if it is readable."""
  if not path.is_file():
    return 'missing'
  try:
    reader = array_record_module.ArrayRecordReader(str(path))
    count = reader.num_records()
    reader.close()
  except Exception as error:  # The library raises nothing narrower.
    return f'cannot be read ({" ".join(str(error).split())[:120]})'
  return '' if count == length else f'has {count} episodes, not {length}'


def open_dataset(directory: str | pathlib.Path) -> EpisodeDataset:
  """Returns the set that a `Log` wrote to a folder.

  Raises:
    ValueError: in one line, if the folder holds no readable set.
  """
  directory = pathlib.Path(directory)
  if not (directory / INFO).is_file():
    raise ValueError(
      f'{directory}: holds no episodes; a run keeps them with '
      '--config.episodes.every=1'
    )
  try:
    builder = tfds.builder_from_directory(str(directory))
  except Exception as error:  # protobuf, json or tfds.
    reason = ' '.join(str(error).split())[:200]
    raise ValueError(f'{directory}: cannot be read: {reason}') from error
  metadata = files.read_stored(directory / 'metadata.json')
  iterations = metadata.get('iterations')
  if 'tokenizer' not in metadata or not _is_increasing(iterations):
    raise ValueError(
      f'{directory}/metadata.json: lacks the tokenizer or the iterations; '
      'needs a set that a run wrote with --config.episodes.every'
    )
  splits = builder.info.splits
  lengths = splits[_SPLIT].shard_lengths if _SPLIT in splits else None
  # During a write, metadata.json can have one iteration more than the index.
  if lengths is None or len(lengths) > len(iterations):
    raise ValueError(
      f'{directory}/{INFO}: does not have a file for each iteration'
    )
  source: Sequence[bytes] = []
  try:
    if lengths:
      source = builder.as_data_source(
        _SPLIT,
        deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES,
      )
  except Exception as error:  # A file is damaged or missing.
    reason = ' '.join(str(error).split())[:200]
    raise ValueError(f'{directory}: cannot be read: {reason}') from error
  return EpisodeDataset(
    directory=directory,
    shards=list(zip(iterations, lengths, strict=False)),
    fingerprint=metadata['tokenizer'],
    source=source,
  )


def _is_increasing(numbers: object) -> bool:
  """Returns whether the value is a list of strictly increasing integers."""
  return (
    isinstance(numbers, list)
    and all(isinstance(n, int) for n in numbers)
    and all(a < b for a, b in itertools.pairwise(numbers))
  )
