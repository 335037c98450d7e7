"""Store episodes as a data set in RLDS format, and read them back.

`tfds.builder_from_directory` reads the set without this module and without
TensorFlow. Input: episodes and the advantages of their steps. Output: one
record, a plain dictionary, per episode. `launch/sft.py` trains on the records
and `viewer` shows them. This module uses no device.

Each file holds one iteration. All files are written atomically, so a set can be
read while it grows and after a kill.
"""

import dataclasses
import functools
import itertools
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow_datasets as tfds
from array_record.python import array_record_module

from gigpo_jax import episode_records, options
from gigpo_jax.runtime import files

# Only for type annotations: the viewer starts without importing jax.
if TYPE_CHECKING:
  from gigpo_jax import (
    algorithms,
    batch,
    group_filter,
    tokenizer,
    trajectory,
  )

FOLDER = 'episodes'  # Folder in a work directory.
TEACHER_FOLDER = 'teacher'  # Folder of the rows of a teacher.
INFO = 'dataset_info.json'
_FEATURES = 'features.json'
_METADATA = 'metadata.json'
_SPLIT = 'train'
_SHARDS = f'{FOLDER}-*.array_record-*'  # Pattern of the names of files.

_DESCRIPTION = """\
Training episodes of a language-model policy, in RLDS format. The last step of
an episode (is_last) holds only the final state. discount is 0 if the
environment ended the episode, also by its own step limit. iteration, group and
member identify an episode; episodes of a group share a task. trained: whether
the episode was trained on. return: sum of rewards. Fields of steps: anchor is
the state in which the step was taken, and anchor_group the id of that state in
the iteration (-1: not trained on). agent took the step (empty: the only agent).
discounted_return, episode_advantage, step_advantage and advantage come from the
algorithm; NaN means not available.
prompt_ids, completion_ids and log_probs are the sampler's inputs and outputs;
tokenizer/ holds the tokenizer.
"""


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of the data set of episodes, `config.episodes`."""

  every: int = options.number(0, low=0, note='0 is never')

  def __post_init__(self):
    options.check(self)


def write(
  directory: str | pathlib.Path,
  text: 'tokenizer.Tokenizer',
  played: Mapping[int, Sequence['trajectory.Trajectory']],
  *,
  seed: int,
) -> None:
  """Writes episodes that are not trained on; replaces the folder's.

  Args:
    directory: folder of the set.
    text: the tokenizer; the set keeps a copy.
    played: episodes by iteration.
    seed: seed of the run.
  """
  writer = EpisodeWriter(directory, text, seed=seed)
  for iteration, trajectories in played.items():
    writer.append(
      iteration,
      [
        episode_records.make_record(
          t, iteration=iteration, seed=seed, step_fields=None
        )
        for t in trajectories
      ],
    )


class EpisodeWriter:
  """Writes the episodes of a run to a data set, one iteration at a time.

  Args:
    directory: folder of the set.
    text: the tokenizer; the set keeps a copy.
    seed: seed of the run.
    every: number of iterations from one write to the next; 0: no writes.
    first_iteration: iteration at which the run starts or resumes. This and
      later stored iterations are dropped, so that each is stored once.
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
    self._text, self._seed, self._every = text, seed, every
    self._metadata = {
      'version': files.VERSION,
      'tokenizer': text.fingerprint,
      'seed': seed,
    }
    self._shards: list[tuple[int, int]] = []
    shards, problem = _stored_shards(
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
    listed = {_path(self._directory, n).name for n in range(len(self._shards))}
    for path in self._directory.glob(_SHARDS):
      if path.name not in listed:
        path.unlink()
    # One by one: after a kill, the index lacks one file at most.
    while self._shards and self._shards[-1][0] >= first_iteration:
      self._shards.pop()
      self._list_shards((INFO, _METADATA))
      _path(self._directory, len(self._shards)).unlink()
    self._list_shards()

  def write(
    self,
    iteration: int,
    collected: 'group_filter.CollectedGroups',
    rows: 'batch.Rows | None' = None,
    output: 'algorithms.AlgorithmOutput | None' = None,
  ) -> dict[str, float]:
    """Writes an iteration to disk if it is due.

    Args:
      iteration: index of the iteration.
      collected: its episodes.
      rows: rows of `collected.kept` that are trained on; others are padding.
        None if no episode is kept.
      output: output of the algorithm for the rows.

    Returns:
      The time of the write, as a metric; empty if the iteration is not due or
      has no episodes.
    """
    if not self._is_due(iteration) or not collected.episodes:
      return {}
    start = time.monotonic()
    by_episode = (
      {} if rows is None else episode_records.make_step_fields(rows, output)
    )
    trained = {
      position: by_episode[index]
      for index, position in enumerate(collected.indices)
      if index in by_episode
    }
    self.append(
      iteration,
      [
        episode_records.make_record(
          episode,
          iteration=iteration,
          seed=self._seed,
          step_fields=trained.get(position),
        )
        for position, episode in enumerate(collected.episodes)
      ],
    )
    return {'time/episodes_secs': time.monotonic() - start}

  def write_teacher(
    self,
    iteration: int,
    rows: 'batch.Rows',
    columns: Mapping[str, np.ndarray],
  ) -> None:
    """Writes the rows of a teacher to disk if the iteration is due.

    Args:
      iteration: index of the iteration.
      rows: the rows.
      columns: columns that the teacher's loss reads, [R] or [R, C].
    """
    if not self._is_due(iteration):
      return
    responses = [
      rows.tokens[r, rows.prompt_lengths[r] : rows.lengths[r]]
      for r in np.flatnonzero(rows.real)
    ]
    self.append(
      iteration,
      episode_records.make_teacher_records(
        rows,
        columns,
        self._text.decode(responses),
        iteration=iteration,
        seed=self._seed,
      ),
    )

  def _is_due(self, iteration: int) -> bool:
    return self._every > 0 and iteration % self._every == 0

  def append(self, iteration: int, records: Sequence[dict[str, Any]]) -> None:
    """Appends the records of an iteration as a new file."""
    path = _path(self._directory, len(self._shards))
    temporary = path.with_name(path.name + '.tmp')
    with files.as_os_errors(path):
      writer = array_record_module.ArrayRecordWriter(
        str(temporary), 'group_size:1'
      )
      for record in records:
        writer.write(episode_records.encode(record))
      writer.close()
    files.rename_synced(temporary, path)
    self._shards.append((iteration, len(records)))
    self._list_shards()

  def _list_shards(self, order: Sequence[str] = (_METADATA, INFO)) -> None:
    """Writes the index files that tfds needs.

    Args:
      order: the files with an entry for each shard, in the order of the writes.
        A kill must not leave the index with more iterations than the metadata.
    """
    paths = [_path(self._directory, n) for n in range(len(self._shards))]
    info = tfds.core.DatasetInfo(
      builder=tfds.core.DatasetIdentity(
        name='episodes',
        version=tfds.core.Version('1.0.0'),
        data_dir=str(self._directory),
        module_name='',
      ),
      description=_DESCRIPTION,
      features=episode_records.features(),
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
    # than the index; `open_dataset` accepts that.
    for name in (_FEATURES, *order):
      files.rename_synced(temporary / name, self._directory / name)
    temporary.rmdir()


def _stored_shards(
  directory: pathlib.Path,
  text: 'tokenizer.Tokenizer',
  first_iteration: int,
  most_repeated: int | None,
) -> tuple[list[tuple[int, int]], str]:
  """Returns the shards of a set, and why they are unusable.

  The reason is empty if the writer can continue the set.
  """
  paths = set(directory.glob(_SHARDS))
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
  return stored.shards, ''


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
    self, iteration: int, group: int | None = None
  ) -> list[dict[str, Any]]:
    """Returns the records of an iteration, or of one of its groups.

    Args:
      iteration: index of the iteration.
      group: index of the group; None: all groups.

    Raises:
      KeyError: if the iteration or group is not in the set.
      ValueError: in one line, if a record is damaged.
    """
    if group is None:
      return self.read_at(self._positions(iteration))
    return self.read_at(self.group_positions(iteration)[group])

  def read_at(self, positions: Iterable[int]) -> list[dict[str, Any]]:
    """Returns the records at some positions in `source`.

    Raises:
      ValueError: in one line, if a record is damaged.
    """
    decode = episode_records.decode
    return [self._decode_at(position, decode) for position in positions]

  def group_positions(self, iteration: int) -> dict[int, list[int]]:
    """Returns the positions in `source` of the records of each group.

    Reads each record of the iteration once.

    Args:
      iteration: index of the iteration.

    Raises:
      KeyError: if the iteration is not in the set.
      ValueError: in one line, if a record is damaged.
    """
    groups: dict[int, list[int]] = {}
    for position in self._positions(iteration):
      group = self._decode_at(position, episode_records.decode_group)
      groups.setdefault(group, []).append(position)
    return groups

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
    read = functools.partial(episode_records.decode, tokens=tokens)
    for _, positions in sorted(self.group_positions(iteration).items()):
      yield [self._decode_at(position, read) for position in positions]

  def __iter__(self) -> Iterator[dict[str, Any]]:
    """Yields all records."""
    count = sum(length for _, length in self.shards)
    return (
      self._decode_at(position, episode_records.decode)
      for position in range(count)
    )

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
  """Checks that an `EpisodeWriter` can continue the set in a folder.

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
  """Returns the problem of a shard in words; '' if it is readable."""
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
  """Returns the set that an `EpisodeWriter` wrote to a folder.

  Raises:
    ValueError: in one line, if the folder holds no readable set.
  """
  directory = pathlib.Path(directory)
  if not (directory / INFO).is_file():
    raise ValueError(
      f'{directory}: holds no episodes; a run keeps them with '
      '--config.episodes.every=1 (chats of your own need an environment with '
      '`demonstrate`)'
    )
  _check_features(directory / _FEATURES)
  try:
    builder = tfds.builder_from_directory(str(directory))
  except Exception as error:  # protobuf, json or tfds.
    reason = ' '.join(str(error).split())[:200]
    raise ValueError(f'{directory}: cannot be read: {reason}') from error
  metadata = files.read_stored(directory / _METADATA)
  iterations = metadata.get('iterations')
  if 'tokenizer' not in metadata or not _is_increasing(iterations):
    raise ValueError(
      f'{directory}/{_METADATA}: lacks the tokenizer or the iterations; '
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


def _check_features(path: pathlib.Path) -> None:
  """Checks that tfds imports no other modules for the fields of a set.

  tfds imports the modules of the classes that the file names, also those in
  JSON inside of strings.

  Raises:
    ValueError: in one line, if the file names other classes than an
      `EpisodeWriter`, or is damaged.
  """
  known = set(_strings(episode_records.features().to_json()))
  for text in _strings(files.read_stored(path)):
    # Names of types and numbers; a module has a dot.
    if text not in known and not re.fullmatch(r'[\w-]*', text):
      raise ValueError(
        f'{path}: names {text!r:.80}; must be the file that a run wrote with '
        '--config.episodes.every'
      )


def _strings(value: Any) -> Iterator[str]:
  """Yields all strings in a value of JSON, without the names of fields."""
  left = [value]
  while left:
    value = left.pop()
    if isinstance(value, str):
      yield value
    elif isinstance(value, (dict, list)):
      left += value.values() if isinstance(value, dict) else value


def _is_increasing(numbers: object) -> bool:
  """Returns whether the value is a list of strictly increasing integers."""
  return (
    isinstance(numbers, list)
    and all(isinstance(n, int) for n in numbers)
    and all(a < b for a, b in itertools.pairwise(numbers))
  )
