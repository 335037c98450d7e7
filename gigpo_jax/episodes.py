"""Episodes as data: a set of records in RLDS's form, written and read.

`tfds.builder_from_directory` reads such a set without this module and without
TensorFlow. Input: episodes and what an algorithm told of their steps. Output:
records, plain dicts, one an episode; `launch/sft.py` trains on them and
`viewer` shows them. Knows no device.

A file holds an iteration; it and the files that list it are written beside
and renamed, so that a set can be read while it grows and after any kill.
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

from gigpo_jax import files

# For their types alone: the viewer starts without jax.
if TYPE_CHECKING:
  from gigpo_jax import algorithms, batch, collection, tokenizer, trajectory

FOLDER = 'episodes'  # of a work directory
INFO = 'dataset_info.json'
_SPLIT = 'train'

# Fields of an episode, and of its steps, one value each.
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
# Fields of steps with a value for each token.
_TOKENS = {
  'prompt_ids': np.int32,
  'completion_ids': np.int32,
  'log_probs': np.float32,
}

# What an algorithm tells of a step, where it tells nothing.
_UNTOLD = {
  'anchor_group': -1,
  'discounted_return': math.nan,
  'episode_advantage': math.nan,
  'step_advantage': math.nan,
  'advantage': math.nan,
}

_DESCRIPTION = """\
Episodes of a language model's policy, as they were played in training, in the
form of RLDS. The last step of an episode (is_last) holds the state that it
ended in and nothing else. discount is 0 where the environment ended the
episode, be it by its own limit of steps. iteration, group, member: when it was
played, and with which others of the same task. trained: whether it was learnt
from. return: sum of rewards. Of steps: anchor is the state that it was taken
in, anchor_group the number of that state in the iteration (-1: not trained
on); discounted_return, episode_advantage, step_advantage, advantage are the
algorithm's, NaN where it does not tell. prompt_ids, completion_ids, log_probs
are what the sampler read and drew; tokenizer/ holds their tokenizer.
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
    episode: as it was played.
    iteration: when.
    seed: of the run.
    told: by the number of a step what `tell` has of it; None if the episode
      was not trained on.
  """
  last = len(episode.steps)
  done = last > 0 and episode.steps[-1].result.done and not episode.failure
  steps = [
    {
      'observation': step.observation,
      'action': step.result.action,
      'reward': step.result.reward,
      'discount': 0.0 if done and number == last - 1 else 1.0,
      'response': step.response,
      'valid': step.result.valid,
      'truncated': step.truncated,
      'prompt_shortened': step.prompt_shortened,
      'anchor': step.anchor,
      'prompt_ids': step.prompt_ids,
      'completion_ids': step.completion_ids,
      'log_probs': step.log_probs,
      **_UNTOLD,
      **(told or {}).get(number, {}),
    }
    for number, step in enumerate(episode.steps)
  ]
  steps.append(_closing(*(episode.end or ('', '')), done))
  for number, step in enumerate(steps):
    step['is_first'], step['is_last'] = number == 0, number == last
    step['is_terminal'] = done and number == last
  return {
    'iteration': iteration,
    'group': episode.group,
    'member': episode.member,
    'task_split': episode.task.split,
    'task_index': episode.task.index,
    'kind': episode.kind,
    'success': episode.success,
    'return': episode.reward,
    'score': math.nan if episode.score is None else episode.score,
    'failure': episode.failure,
    'trained': told is not None,
    'seed': seed,
    'steps': steps,
  }


def _closing(text: str, anchor: str, done: bool) -> dict[str, Any]:
  """Returns the step that only tells where an episode ended."""
  empty = {name: np.zeros(0, kind) for name, kind in _TOKENS.items()}
  neutral = {name: kind() for name, kind in _STEP.items()}
  ended = {'observation': text, 'anchor': anchor, 'discount': float(not done)}
  return neutral | empty | _UNTOLD | ended


def tell(
  rows: 'batch.Rows', credit: 'algorithms.Credit'
) -> dict[int, dict[int, dict[str, float]]]:
  """Returns what an algorithm told, by number of the episode and of the step.

  Where it gives tokens advantages of their own, a step's is their mean.
  """
  advantages = credit.advantages
  if advantages.ndim > 1:
    mask = rows.completion_mask
    number = np.maximum(mask.sum(axis=1), 1)
    advantages = np.where(mask, advantages, 0).sum(axis=1) / number
  columns = {'anchor_group': rows.anchors, 'advantage': advantages}
  if credit.parts is not None:
    columns |= {
      'discounted_return': credit.parts.returns,
      'episode_advantage': credit.parts.episode_advantage,
      'step_advantage': credit.parts.step_advantage,
    }
  told: dict[int, dict[int, dict[str, float]]] = {}
  for r in np.flatnonzero(rows.real):
    steps = told.setdefault(int(rows.episodes[r]), {})
    steps[int(rows.steps[r])] = {k: v[r].item() for k, v in columns.items()}
  return told


def encode(episode: dict[str, Any]) -> bytes:
  """Returns a record as a tf.train.Example, as tfds lays it out."""
  features = {
    name: _feature([episode[name]], kind) for name, kind in _EPISODE.items()
  }
  steps = episode['steps']
  for name, kind in _STEP.items():
    features[f'steps/{name}'] = _feature([step[name] for step in steps], kind)
  for name, kind in _TOKENS.items():
    values = [np.asarray(step[name], kind) for step in steps]
    flat, lengths = _ragged(name)
    features[flat] = _feature(np.concatenate(values), kind)
    features[lengths] = _feature([len(v) for v in values], np.int64)
  return tf_example_pb2.Example(
    features=tf_feature_pb2.Features(feature=features)
  ).SerializeToString(deterministic=True)


def decode(data: bytes, *, tokens: bool = True) -> dict[str, Any]:
  """Returns the record that `encode` was given; without tokens it is quick."""
  found = tf_example_pb2.Example.FromString(data).features.feature
  episode = {
    name: _values(found[name], kind)[0] for name, kind in _EPISODE.items()
  }
  columns = {
    name: _values(found[f'steps/{name}'], kind) for name, kind in _STEP.items()
  }
  for name, kind in _TOKENS.items() if tokens else ():
    flat, lengths = _ragged(name)
    ends = np.cumsum(_values(found[lengths], np.int64))
    columns[name] = np.split(_values(found[flat], kind), ends[:-1])
  steps = [
    dict(zip(columns, values, strict=True))
    for values in zip(*columns.values(), strict=True)
  ]
  return episode | {'steps': steps}


def _group(data: bytes) -> int:
  """Returns the group of an encoded record; cheaper than `decode`."""
  features = tf_example_pb2.Example.FromString(data).features.feature
  return int(features['group'].int64_list.value[0])


def _ragged(name: str) -> tuple[str, str]:
  return (
    f'steps/{name}/ragged_flat_values',
    f'steps/{name}/ragged_row_lengths_0',
  )


def _feature(values: Sequence, kind: type) -> tf_feature_pb2.Feature:
  if kind is str:
    # Half of a surrogate pair is no character: it is spelt out.
    texts = [value.encode(errors='backslashreplace') for value in values]
    return tf_feature_pb2.Feature(
      bytes_list=tf_feature_pb2.BytesList(value=texts)
    )
  # As lists, which are taken over four times as fast as arrays.
  if kind is np.float32:
    numbers = np.asarray(values, kind).tolist()
    return tf_feature_pb2.Feature(
      float_list=tf_feature_pb2.FloatList(value=numbers)
    )
  numbers = np.asarray(values, np.int64).tolist()
  return tf_feature_pb2.Feature(
    int64_list=tf_feature_pb2.Int64List(value=numbers)
  )


def _values(feature: tf_feature_pb2.Feature, kind: type) -> Sequence:
  if kind is str:
    return [text.decode() for text in feature.bytes_list.value]
  if kind is np.float32:
    return np.array(feature.float_list.value, kind)
  return np.array(feature.int64_list.value, np.int64).astype(kind)


class Log:
  """Keeps the episodes of a run as a data set, an iteration at a time.

  Args:
    directory: the set's folder.
    text: the tokenizer, of which a copy is kept.
    seed: of the run.
    every: iterations between two that are kept.
    first_iteration: where the run begins or resumes; what is there from then
      on is dropped, so that every iteration is there once.
    most_repeated: how many iterations from there on a kill explains. If there
      are more, or files that no list names, the folder is kept as episodes.bak;
      None: any number.
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
    shards, wrong = _past(self._directory, text, first_iteration, most_repeated)
    if wrong:
      backup = files.free_name(self._directory)
      self._directory.rename(backup)
      print(
        f'{self._directory}: {wrong}; the folder is kept as {backup.name}',
        flush=True,
      )
    else:
      self._shards = shards
    self._directory.mkdir(parents=True, exist_ok=True)
    with files.written(self._directory):
      text.save(str(self._directory / 'tokenizer'))
    self._list_shards()
    listed = {_path(self._directory, n).name for n in range(len(self._shards))}
    for path in self._directory.glob('episodes-*'):
      if path.name not in listed:
        path.unlink()

  def write(
    self,
    iteration: int,
    collected: 'collection.Collected',
    rows: 'batch.Rows | None' = None,
    credit: 'algorithms.Credit | None' = None,
  ) -> dict[str, float]:
    """Keeps an iteration if it is due; on disk when this returns.

    Args:
      iteration: its number.
      collected: its episodes.
      rows: of `collected.kept`; None if there are none.
      credit: of the rows.

    Returns:
      How long it took, as a metric.
    """
    if iteration % self._every:
      return {}
    begin = time.monotonic()
    told = {} if rows is None else tell(rows, credit)
    trained = {
      place: told.get(number, {})
      for number, place in enumerate(collected.places)
      if not collected.played[place].failure
    }
    self.append(
      iteration,
      [
        record(t, iteration=iteration, seed=self._seed, told=trained.get(place))
        for place, t in enumerate(collected.played)
      ],
    )
    return {'time/episodes_secs': time.monotonic() - begin}

  def append(self, iteration: int, records: Sequence[dict[str, Any]]) -> None:
    """Adds the records of an iteration."""
    path = _path(self._directory, len(self._shards))
    beside = path.with_name(path.name + '.tmp')
    with files.written(path):
      writer = array_record_module.ArrayRecordWriter(
        str(beside), 'group_size:1'
      )
      for found in records:
        writer.write(encode(found))
      writer.close()
    files.settle(beside, path)
    self._shards.append((iteration, len(records)))
    self._list_shards()

  def _list_shards(self) -> None:
    """Writes what tfds has to know of the set."""
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
      shard_lengths=[number for _, number in self._shards],
      num_bytes=sum(path.stat().st_size for path in paths),
      filename_template=_template(self._directory),
    )
    info.set_splits(tfds.core.SplitDict([split]))
    beside = self._directory / 'info.tmp'
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    info.write_to_directory(str(beside))
    # The list of iterations may be longer than that of files, for a moment.
    for name in ('features.json', 'metadata.json', INFO):
      files.settle(beside / name, self._directory / name)
    beside.rmdir()


def _past(
  directory: pathlib.Path,
  text: 'tokenizer.Tokenizer',
  first_iteration: int,
  most_repeated: int | None,
) -> tuple[list[tuple[int, int]], str]:
  """Returns the shards before an iteration, and why not to go on with them."""
  paths = set(directory.glob(f'{FOLDER}-*.array_record-*'))
  paths = {path for path in paths if path.suffix != '.tmp'}
  if not (directory / INFO).exists():
    return [], f'has {len(paths)} files but no {INFO}' if paths else ''
  there = open_set(directory)
  if there.fingerprint != text.fingerprint:
    return [], 'holds the tokens of another tokenizer'
  # The one that was written last may not be in the list yet.
  known = {_path(directory, n) for n in range(len(there.shards) + 1)}
  if unknown := sorted(path.name for path in paths - known):
    return [], f'{INFO} does not list {unknown[0]}'
  repeated = [n for n, _ in there.shards if n >= first_iteration]
  if most_repeated is not None and len(repeated) > most_repeated:
    return [], (
      f'has {len(repeated)} iterations from {first_iteration} on, of no '
      'checkpoint that is there'
    )
  return [s for s in there.shards if s[0] < first_iteration], ''


def _features() -> tfds.features.FeaturesDict:
  def feature(kind: type):
    return tfds.features.Text() if kind is str else kind

  steps = {name: feature(kind) for name, kind in _STEP.items()}
  steps |= {
    name: tfds.features.Sequence(kind) for name, kind in _TOKENS.items()
  }
  return tfds.features.FeaturesDict(
    {name: feature(kind) for name, kind in _EPISODE.items()}
    | {'steps': tfds.features.Dataset(steps)}
  )


@dataclasses.dataclass(frozen=True)
class EpisodeSet:
  """A set on disk.

  Attributes:
    directory: its folder.
    shards: (iteration, number of episodes) of each file.
    fingerprint: of the tokenizer of its ids.
    source: the records, encoded, one after another.
  """

  directory: pathlib.Path
  shards: list[tuple[int, int]]
  fingerprint: str
  source: Sequence[bytes]

  @property
  def iterations(self) -> list[int]:
    """Iterations that were kept."""
    return [iteration for iteration, _ in self.shards]

  def read(
    self, iteration: int, group: int | None = None, *, tokens: bool = True
  ) -> list[dict[str, Any]]:
    """Returns the records of an iteration, or of one of its groups.

    Args:
      iteration: its number.
      group: its number; None: all.
      tokens: whether with what there is for each token.

    Raises:
      KeyError: if there is none.
      ValueError: in one line, if a record is damaged.
    """
    places = self._places(iteration)
    if group is not None:
      places = [n for n in places if self._decoded(n, _group) == group]
    if not places:
      raise KeyError(group)
    read = functools.partial(decode, tokens=tokens)
    return [self._decoded(place, read) for place in places]

  def groups(
    self, iteration: int, *, tokens: bool = True
  ) -> Iterator[list[dict[str, Any]]]:
    """Yields the records of each group of an iteration, by its number.

    Reads every record twice, however many groups there are.

    Args:
      iteration: its number.
      tokens: whether with what there is for each token.

    Raises:
      KeyError: if there is none.
      ValueError: in one line, if a record is damaged.
    """
    groups: dict[int, list[int]] = {}
    for place in self._places(iteration):
      groups.setdefault(self._decoded(place, _group), []).append(place)
    read = functools.partial(decode, tokens=tokens)
    for _, places in sorted(groups.items()):
      yield [self._decoded(place, read) for place in places]

  def __iter__(self) -> Iterator[dict[str, Any]]:
    """Yields all records."""
    count = sum(number for _, number in self.shards)
    return (self._decoded(place, decode) for place in range(count))

  def _places(self, iteration: int) -> Sequence[int]:
    """Returns the positions of an iteration's records in `source`."""
    if iteration not in self.iterations:
      raise KeyError(iteration)
    shard = self.iterations.index(iteration)
    start = sum(number for _, number in self.shards[:shard])
    return range(start, start + self.shards[shard][1])

  def _decoded(self, place: int, read: Callable[[bytes], Any]) -> Any:
    """Returns what `read` makes of the record at a position."""
    try:
      return read(self.source[place])
    except Exception as error:  # Of ArrayRecord, protobuf, numpy, UTF-8.
      reason = ' '.join(str(error).split())[:200]
      shard, first = 0, 0
      while place >= first + self.shards[shard][1]:
        first += self.shards[shard][1]
        shard += 1
      name = _path(self.directory, shard).name
      raise ValueError(
        f'{self.directory}/{name}: record {place - first} is damaged '
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
    # Without the number of shards, which would rename all with each.
    template='{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}',
    dataset_name='episodes',
    split=_SPLIT,
    filetype_suffix='array_record',
  )


def check_folder(directory: pathlib.Path) -> None:
  """Looks whether a `Log` can go on with what is in a folder.

  Raises:
    ValueError: in one line, if it cannot.
  """
  if not (directory / INFO).exists():
    return
  remedy = 'move the folder away, to keep episodes from here on'
  try:
    found = open_set(directory)
  except ValueError as error:
    raise ValueError(f'{error}; {remedy}') from error
  for number, (_, length) in enumerate(found.shards):
    path = _path(directory, number)
    if wrong := _damage(path, length):
      raise ValueError(f'{path}: {wrong}; {remedy}')


def _damage(path: pathlib.Path, length: int) -> str:
  """Returns what is wrong with a shard; '' if it can be read."""
  if not path.is_file():
    return 'missing'
  try:
    reader = array_record_module.ArrayRecordReader(str(path))
    there = reader.num_records()
    reader.close()
  except Exception as error:  # The library raises nothing narrower.
    return f'cannot be read ({" ".join(str(error).split())[:120]})'
  return '' if there == length else f'has {there} episodes, not {length}'


def open_set(directory: str | pathlib.Path) -> EpisodeSet:
  """Returns a set that a `Log` has written.

  Raises:
    ValueError: in one line, if there is none.
  """
  directory = pathlib.Path(directory)
  if not (directory / INFO).is_file():
    raise ValueError(
      f'{directory}: no episodes there; a run keeps them with '
      '--config.episodes.every=1'
    )
  try:
    builder = tfds.builder_from_directory(str(directory))
  except Exception as error:  # Of protobuf, json, tfds.
    reason = ' '.join(str(error).split())[:200]
    raise ValueError(f'{directory}: cannot be read: {reason}') from error
  metadata = files.read_stored(directory / 'metadata.json')
  iterations = metadata.get('iterations')
  if 'tokenizer' not in metadata or not _rises(iterations):
    raise ValueError(
      f'{directory}/metadata.json: does not tell the tokenizer of the tokens, '
      'or the iterations; needs a set that was made with '
      '--config.episodes.every'
    )
  splits = builder.info.splits
  lengths = splits[_SPLIT].shard_lengths if _SPLIT in splits else None
  # The list of iterations may be longer, for a moment.
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
  except Exception as error:  # Of a file that is damaged or missing.
    reason = ' '.join(str(error).split())[:200]
    raise ValueError(f'{directory}: cannot be read: {reason}') from error
  return EpisodeSet(
    directory=directory,
    shards=list(zip(iterations, lengths, strict=False)),
    fingerprint=metadata['tokenizer'],
    source=source,
  )


def _rises(numbers: object) -> bool:
  """Returns whether it is a list of rising iterations."""
  return (
    isinstance(numbers, list)
    and all(isinstance(n, int) for n in numbers)
    and all(a < b for a, b in itertools.pairwise(numbers))
  )
